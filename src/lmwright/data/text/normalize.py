"""Normalize: any input to parquet rows of (id, text, source, meta, split, rows).

    slices --read--> rows --nfc--> hash --+--> <dir>/normalize/part-00000.parquet
                                          |    (dedup = "none")
                                          +--> <dir>/read --drop later equals--> the same

The hash of a text decides whether it is held out, so neither its place nor its neighbors do.
"""

import functools
import itertools
import os
import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lmwright.config.rows import PLAIN
from lmwright.config.run import Data, Source
from lmwright.data.bad_examples import (
    QUARANTINE,
    BadWriter,
    bad_file,
    first_reasons,
    gather_bad,
    read_bad,
)
from lmwright.data.manifest import Manifest, add_counts, save_array, total
from lmwright.data.portions import Portion
from lmwright.data.progress import Progress
from lmwright.data.sources.columns import (
    Bad,
    content_columns,
    list_needed_columns,
    names_of,
    refuse_plain,
)
from lmwright.data.sources.file import RECORDS, Slice, refuse_changed
from lmwright.data.sources.files import PART_BYTES, cut_parts, find_files, source_names
from lmwright.data.sources.read import read_rows
from lmwright.data.stage import find_finished_stage, run_stage
from lmwright.data.text.dedup import drop_duplicates
from lmwright.data.text.holdout import hold_out
from lmwright.data.text.parts import Part, TableWriter, part_file
from lmwright.data.text.sample import (
    Document,
    SampleDraw,
    Sampler,
    counting_of,
    draw_parts,
    gather_samples,
    is_sampled,
)
from lmwright.errors import UserError
from lmwright.guard.files import write_whole
from lmwright.guard.redact import redact_tree
from lmwright.guard.urls import has_secrets, redact_text, without_secrets


def normalize(
    data: Data,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    part_bytes: int = PART_BYTES,
    portion: Portion | None = None,
) -> Manifest:
    """Reads every source into `<data.dir>/normalize`: parquet parts and quarantine.jsonl.

    Counts: `sources` has `docs` and `bytes` per split and source; `input` has `rows`, `bad`,
    `missing`, `empty` and `duplicates` per source. Raises UserError for input that cannot be
    read, an empty corpus, a wrong column, more bad rows than allowed.
    """
    folder = Path(data.dir).absolute()
    parts = plan_parts(data, part_bytes, portion)
    draw = SampleDraw(parts) if is_sampled(data) else None
    exact = data.normalize.dedup == "exact"
    # a new token or signature of a URL makes no new data, and is nothing to write down
    described = redact_tree([_described(p) for p in parts], without_secrets)
    fingerprint = {"parts": described, "dedup": data.normalize.dedup}
    if data.normalize.unicode != "none":
        fingerprint["unicodedata"] = unicodedata.unidata_version
    if any(s.path.startswith("memory://") for s in data.sources):
        workers = 1  # it lies in the memory of this process
    limit = data.normalize.max_bad_fraction
    private = any(has_secrets(source.path) for source in data.sources)
    options = {"workers": workers, "progress": progress, "unit": "bytes", "private": private}
    done = find_finished_stage(
        "normalize", folder / "normalize", len(parts), fingerprint=fingerprint
    )
    if done is None:
        name = "read" if exact else "normalize"

        def finish(counts: Sequence[dict[str, Any]], temp: Path) -> dict[str, Any]:
            used = [parts[number] for number in draw.chosen] if draw else parts
            facts = gather_samples(parts, counts)
            facts |= _finish(used, counts, folder / name, temp, limit)
            if portion is not None:
                facts |= portion.ends(used, counts)
            elif not exact:
                hold_out(used, counts, folder / name, temp)
            return facts

        done = run_stage(
            name, folder / name, parts, write_part, fingerprint=fingerprint, finish=finish,
            draw=draw, **options,
        )  # fmt: skip
        if exact:
            done = drop_duplicates(folder, done, parts, fingerprint, options)
    if exact:
        shutil.rmtree(folder / "read", ignore_errors=True)
    # the limit may have been lowered since
    _check_bad(done.counts["input"], folder / "normalize" / QUARANTINE, limit)
    return done


def _described(part: Part) -> dict[str, Any]:
    """A part in a fingerprint, without the lengths that only the next stage looks at."""
    described = asdict(part)
    for name in ("min_tokens", "max_tokens"):
        del described["source"][name]
    if part.most_tokens is None:  # as before there were samples
        del described["most_tokens"], described["counting"]
        del described["source"]["sample_tokens"], described["source"]["sample_seed"]
    else:  # any route gives the same ids, and the folder may be a mirror
        del described["counting"]["folder"], described["counting"]["route"]
    if part.portion is None:  # as before there were portions
        del described["portion"], described["skip_rows"]
    else:  # the lengths say which documents are counted
        limits = ("min_tokens", "max_tokens")
        described["lengths"] = [getattr(part.source, name) for name in limits]
    for name in ("prompts", "unlabeled"):  # as before there were any
        if not getattr(part.source, name):
            del described["source"][name]
    return described


def plan_parts(data: Data, part_bytes: int, portion: Portion | None = None) -> list[Part]:
    """Parts of all sources in their order; depends on the sources and their files only. Of a
    portion, those from its beginning on."""
    if not data.sources:
        raise UserError("data.sources is empty; name at least one file, folder or dataset")
    if "://" in data.dir:
        raise UserError(
            f"data.dir: {data.dir} is a URL; prepare in a local folder and copy it there"
        )
    for place, source in enumerate(data.sources):
        if not source.path.strip():  # which would be the current folder
            raise UserError(
                f"data.sources.{place}.path: is empty; name a file, folder, glob or URL"
            )
    parts: list[Part] = []
    own = data.dir if portion is None else os.path.dirname(data.dir)  # holds no sources
    counting = counting_of(data, Path(data.dir).absolute())
    names = source_names(data.sources)
    for name, source in zip(names, data.sources, strict=True):
        source = replace(source, weight=None, name=name)
        most = source.sample_tokens
        sample: tuple[Any, ...] = (most, counting) if most else ()

        def cut(source: Source = source) -> list[tuple[Slice, ...]]:
            made, files = draw_parts if source.sample_tokens else cut_parts, find_files(source, own)
            refuse_plain(source, files)
            return list(made(files, source, part_bytes))

        first, skip = 0, 0
        if portion is not None:
            sample = (most, counting, portion.number)
            first, skip = portion.starts.get(name, (0, 0))
        for slices in portion.order(name, cut)[first:] if portion is not None else cut():
            settings = (data.normalize.unicode, data.holdout_fraction)
            hashes = data.normalize.dedup == "exact"
            part = Part(len(parts), name, source, slices, *settings, hashes, *sample)
            parts.append(replace(part, skip_rows=skip))
            skip = 0
    return parts


def write_part(part: Part, tmp_dir: Path) -> dict[str, Any]:
    """Work of one part: writes its documents, bad rows and hashes; returns the counts."""
    tally = dict.fromkeys(("rows", "bad", "missing", "empty", "duplicates"), 0)
    counts: dict[str, dict[str, dict[str, int]]] = {}
    hashes: list[bytes] = []
    with ExitStack() as stack:
        table = stack.enter_context(TableWriter(tmp_dir / part_file(part.number)))
        bad = stack.enter_context(BadWriter(tmp_dir / bad_file(part.number)))
        sampler = Sampler(part)
        for document in sampler.take(_documents(part)):
            row, text = document.row, document.text
            tally["rows"] += 1
            if isinstance(row, Bad):
                tally["bad"] += 1
                tally["missing"] += row.missing
                bad.write(_bad_entry(part, document.piece, row))
                continue
            if text is None:
                tally["empty"] += 1
                continue
            raw = text.encode()
            digest = xxhash.xxh3_128_digest(raw)
            split = "eval" if part.holds_out(digest) else "train"
            if split == "eval" and part.portion:
                continue
            kind = part.source.rows if part.source.rows in PLAIN else "chat"
            table.write((row.id, text, part.name, row.meta, split, kind), len(raw))
            entry = counts.setdefault(split, {}).setdefault(part.name, {"docs": 0, "bytes": 0})
            entry["docs"] += 1
            entry["bytes"] += len(raw)
            if part.hashes:
                hashes.append(digest)
    for piece in part.slices:
        refuse_changed(piece.file)
    if part.hashes:
        digests = np.frombuffer(b"".join(hashes), "<u8").reshape(-1, 2)
        (tmp_dir / "hashes").mkdir()
        save_array(tmp_dir / f"hashes/part-{part.number:05d}.npy", digests)
    return {"sources": counts, "input": {part.name: tally}} | sampler.counts()


def _documents(part: Part) -> Iterator[Document]:
    rows = ((piece, row) for piece in part.slices for row in read_rows(piece, part.source))
    for piece, row in itertools.islice(rows, part.skip_rows, None):
        text = None if isinstance(row, Bad) else row.text
        if text is not None and part.unicode == "nfc":
            text = unicodedata.normalize("NFC", text)
        yield Document(piece, row, text if text is not None and text.strip() else None)


def _bad_entry(part: Part, piece: Slice, row: Bad) -> dict[str, Any]:
    place = "row" if piece.file.format in ("parquet", "arrow", "hub", *RECORDS) else "line"
    file = redact_text(piece.file.path)
    return {"source": part.name, "file": file, place: row.number, "reason": row.reason[:500]}


def _finish(
    parts: Sequence[Part],
    counts: Sequence[dict[str, Any]],
    folder: Path,
    temp: Path,
    limit: float,
) -> dict[str, Any]:
    """Gathers the bad rows. Raises UserError if the result is not a corpus."""
    tally = functools.reduce(add_counts, (count["input"] for count in counts), {})
    gather_bad(folder, [part.number for part in parts], temp)
    try:
        _check_columns(parts, tally, temp / QUARANTINE)
        _check_bad(tally, temp / QUARANTINE, limit)
        if not any(total(count["sources"], "docs") for count in counts):
            rows, bad = (sum(t[key] for t in tally.values()) for key in ("rows", "bad"))
            listed = f"{bad} bad, listed in {temp / QUARANTINE}, and {rows - bad} empty"
            what = listed if bad else "all empty"
            raise UserError(
                f"data.sources hold no text ({rows} rows: {what}); add a source with text"
            )
    except UserError as e:
        # the stage stays unfinished, yet the user gets to read what was wrong
        place = folder / QUARANTINE
        write_whole(place, (temp / QUARANTINE).read_bytes())
        raise UserError(str(e).replace(str(temp / QUARANTINE), str(place))) from None
    if not parts[0].hashes:
        return {}
    return {"parts": list(counts), "numbers": [part.number for part in parts]}


def _check_columns(
    parts: Sequence[Part], tally: dict[str, dict[str, int]], quarantine: Path
) -> None:
    for part in parts:
        seen = tally[part.name]
        if seen["missing"] and seen["missing"] == seen["rows"]:
            reason = next(e["reason"] for e in read_bad(quarantine) if e["source"] == part.name)
            field = next(iter(list_needed_columns(part.source)))
            raise UserError(
                f"data.sources: no row of {part.source.path} has "
                f"{names_of(content_columns(part.source))} ({seen['rows']} rows read, listed in "
                f"{quarantine}; the first: {reason}); change data.sources.{field} or "
                "data.sources.rows"
            )


def _check_bad(tally: dict[str, dict[str, int]], quarantine: Path, limit: float) -> None:
    bad, rows = (sum(t[key] for t in tally.values()) for key in ("bad", "rows"))
    if bad <= limit * rows:
        return
    name = lambda e: f"{os.path.basename(e['file'])}:{e.get('line', e.get('row'))}"  # noqa: E731
    shown = first_reasons(quarantine, name)
    raise UserError(
        f"{bad} of {rows} rows are bad, more than data.normalize.max_bad_fraction={limit:g} "
        f"allows; they are listed in {quarantine}; the first: {shown}; "
        "correct the input or raise the fraction"
    )
