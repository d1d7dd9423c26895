"""Holdout: where chance holds out none of a source's few documents, one all the same.

    documents   hash < fraction --> eval       else the one of the lowest hash
    a single one                               its end, at a line or a blank where there is one

So that a run which asks for held-out text has some, whatever the size of its text.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

LEAST_CHARS = 2000
LEAST_SHARE = 0.1
Counts = dict[str, Any]


def ensure_held_out(
    names: Sequence[str], counts: Sequence[Counts], folder: Path, temp: Path, fraction: float
) -> None:
    """Moves a document, or the end of one, into the eval split of each source without any.

    names: the source of each part, "" for those that are left as they are. counts: of each
    part, changed in place. folder: has the parts' rows; temp: where parts are written that replace theirs.
    """
    for name in dict.fromkeys(filter(None, names)):
        mine = [i for i, n in enumerate(names) if n == name]
        docs = {s: sum(_entry(counts[i], s, name)["docs"] for i in mine) for s in ("train", "eval")}
        if docs["eval"] or not docs["train"]:
            continue
        number, row = _lowest([(i, folder / part_file(i)) for i in mine])
        path, target = folder / part_file(number), temp / part_file(number)
        if docs["train"] > 1:
            size = _rewrite(path, target, row, None)
            _move(counts[number], name, docs=1, size=size)
        elif (cut := _cut(path, row, fraction)) is not None:
            size = _rewrite(path, target, row, cut)
            _move(counts[number], name, docs=0, size=size)


def part_file(number: int) -> str:
    """Name of a part's rows below the stage's folder."""
    return f"part-{number:05d}.parquet"


def _entry(counts: Counts, split: str, name: str) -> Counts:
    return counts["sources"].get(split, {}).get(name, {"docs": 0, "bytes": 0})


def _move(counts: Counts, name: str, docs: int, size: int) -> None:
    """Counts one more document of `size` bytes in eval, and `docs` and the bytes less in train."""
    train = _entry(counts, "train", name)
    train["docs"] -= docs
    train["bytes"] -= size
    if not train["docs"]:
        del counts["sources"]["train"][name]
    counts["sources"].setdefault("eval", {})[name] = {"docs": 1, "bytes": size}


def _groups(path: Path) -> Iterator[pa.Table]:
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for i in range(file.num_row_groups):
            yield file.read_row_group(i)


def _lowest(paths: Sequence[tuple[int, Path]]) -> tuple[int, int]:
    """Part and row of the text whose hash is the lowest."""
    best: tuple[bytes, int, int] | None = None
    for number, path in paths:
        row = 0
        for table in _groups(path) if path.exists() else ():
            for text in table["text"]:
                found = (xxhash.xxh3_128_digest(text.as_py().encode()), number, row)
                best = found if best is None else min(best, found)
                row += 1
    assert best is not None, "a source with documents has rows"
    return best[1:]


def _row(path: Path, row: int) -> dict[str, str]:
    for table in _groups(path):
        if row < table.num_rows:
            return table.slice(row, 1).to_pylist()[0]
        row -= table.num_rows
    raise IndexError(row)


def _cut(path: Path, row: int, fraction: float) -> int | None:
    """Where the end of a text begins that is to be held out; None if it cannot be cut."""
    document = _row(path, row)
    text = document["text"]
    if document["rows"] != "text":
        return None  # an example is learned as a whole
    least = min(LEAST_CHARS, len(text) * LEAST_SHARE)
    at = len(text) - math.ceil(max(fraction * len(text), least))
    for mark in ("\n", " "):
        place = text.find(mark, at, (at + len(text)) // 2) + 1
        if place:
            at = place
            break
    return at if text[:at].strip() and text[at:].strip() else None


def _rewrite(source: Path, target: Path, row: int, cut: int | None) -> int:
    """Writes the rows with one of them in eval, or its text from `cut` on; bytes of that."""
    from lmwright.data.normalize import TableWriter

    size = 0
    with TableWriter(target) as writer:
        for table in _groups(source):
            if 0 <= row < table.num_rows:
                rows = table.to_pylist()
                held = rows[row] | {"split": "eval"}
                if cut is not None:
                    text = held["text"]
                    rows.insert(row, rows[row] | {"text": text[:cut]})
                    held |= {"text": text[cut:], "id": f"{held['id']}#end"}
                    row += 1
                rows[row] = held
                size = len(held["text"].encode())
                table = pa.Table.from_pylist(rows, schema=table.schema)
                row = -1
            else:
                row -= table.num_rows
            writer.write_table(table)
    return size
