"""Holdout: holds out one document of a source if chance holds out none, or all, of its few
documents.

    documents   hash < fraction --> eval       else the one of the lowest hash, and its equals
    a single one                               its end, at a line or a blank where there is one

A run that asks for held-out text thus has some, whatever the size of its text, and of each source
some that is learned.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from lmwright.data.text.parts import Part, TableWriter, part_file

CUT_FROM_CHARS = 1000
LEAST_CHARS = 2000
LEAST_SHARE = 0.1
Counts = dict[str, Any]


def hold_out(parts: Sequence[Part], counts: Sequence[Counts], folder: Path, temp: Path) -> None:
    """Moves a document, or the end of one, into the eval split of each training source without
    any, if held-out text is asked for; and all else of a source out of it that has nothing else.

    counts: of each part, changed in place. folder: has the parts' rows; temp: where parts are
    written that replace theirs.
    """
    asked = [i for i, p in enumerate(parts) if p.source.use == "train" and p.holdout_fraction]
    for name in dict.fromkeys(parts[i].name for i in asked):
        mine = [i for i in asked if parts[i].name == name]
        docs = {s: sum(_entry(counts[i], s, name)["docs"] for i in mine) for s in ("train", "eval")}
        if bool(docs["eval"]) == bool(docs["train"]):
            continue
        returned = mine if docs["eval"] else []
        for i in returned:
            _return(counts[i], name)
        paths = {i: folder / part_file(parts[i].number) for i in mine}
        held, others = _lowest(paths)  # equal texts go together, as with any hash
        cut = None
        if not others:
            one = paths[min(held)] if sum(docs.values()) == 1 else None
            cut = _cut(one, parts[min(held)].holdout_fraction) if one else None
            held = held if cut is not None else {}
        for i in sorted({*returned, *held}):
            if paths[i].exists():
                rows = held.get(i, [])
                size = _rewrite(paths[i], temp / paths[i].name, rows, cut)
                if rows:
                    _move(counts[i], name, len(rows) if cut is None else 0, len(rows), size)


def _entry(counts: Counts, split: str, name: str) -> Counts:
    return counts["sources"].get(split, {}).get(name, {"docs": 0, "bytes": 0})


def _return(counts: Counts, name: str) -> None:
    """Counts documents in train that were in eval."""
    sources = counts["sources"]
    if name in sources.get("eval", {}):
        sources.setdefault("train", {})[name] = sources["eval"].pop(name)
        if not sources["eval"]:
            del sources["eval"]


def _move(counts: Counts, name: str, fewer: int, more: int, size: int) -> None:
    """Counts `more` documents of `size` bytes in eval, and `fewer` without those bytes in train."""
    train = _entry(counts, "train", name)
    train["docs"] -= fewer
    train["bytes"] -= size
    if not train["docs"]:
        del counts["sources"]["train"][name]
    counts["sources"].setdefault("eval", {})[name] = {"docs": more, "bytes": size}


def _groups(path: Path) -> Iterator[pa.Table]:
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for i in range(file.num_row_groups):
            yield file.read_row_group(i)


def _lowest(paths: Mapping[int, Path]) -> tuple[dict[int, list[int]], bool]:
    """Rows by part of the text with the lowest hash, and whether there are other texts."""
    best, rows, others = b"", {}, False
    for number, path in paths.items():
        row = -1
        for table in _groups(path) if path.exists() else ():
            for text in table["text"]:
                row += 1
                digest = xxhash.xxh3_128_digest(text.as_py().encode())
                others |= bool(rows) and digest != best
                if not rows or digest < best:
                    best, rows = digest, {}
                if digest == best:
                    rows.setdefault(number, []).append(row)
    return rows, others


def _cut(path: Path, fraction: float) -> int | None:
    """Position where the held-out end of the only text begins; None if it cannot be split."""
    (document,) = next(_groups(path)).to_pylist()
    text = document["text"]
    if document["rows"] != "text" or len(text) < CUT_FROM_CHARS:
        return None  # an example is learned as a whole
    least = min(LEAST_CHARS, len(text) * LEAST_SHARE)
    at = len(text) - math.ceil(max(fraction * len(text), least))
    for mark in ("\n", " "):
        place = text.find(mark, at, (at + len(text)) // 2) + 1
        if place:
            at = place
            break
    return at if text[:at].strip() and text[at:].strip() else None


def _rewrite(source: Path, target: Path, held: Sequence[int], cut: int | None) -> int:
    """Writes the rows with some of them in eval, or the text of one from `cut` on, and the others
    in train; returns the bytes that are held out."""
    size, row, wanted = 0, -1, set(held)
    with TableWriter(target) as writer:
        for table in _groups(source):
            rows = []
            for document in table.to_pylist():
                row += 1
                document["split"] = "train"
                if row in wanted:
                    if cut is not None:
                        text = document["text"]
                        rows.append(document | {"text": text[:cut]})
                        document |= {"text": text[cut:], "id": f"{document['id']}#end"}
                    document |= {"split": "eval"}
                    size += len(document["text"].encode())
                rows.append(document)
            writer.write_table(pa.Table.from_pylist(rows, schema=table.schema))
    return size
