"""Dedup: keeps the first of documents with equal text; eval sources come first.

    <dir>/read: parts and 16 bytes of hash a document --keep_first--> rows to drop
    <dir>/read/part --without those rows--> <dir>/normalize/part, <dir>/read goes after

An eval source wins over training text, so that nothing held out is trained on. Memory: some 50
bytes a document for one bucket of hashes at a time, 8 bytes for each that is dropped.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lmwright.data.bad_examples import QUARANTINE
from lmwright.data.draw import Fixed
from lmwright.data.manifest import Manifest
from lmwright.data.stage import run_stage
from lmwright.data.text.holdout import hold_out
from lmwright.data.text.parts import COUNTED, Part, TableWriter, part_file

BUCKET_DOCS = 1 << 22


@dataclass(frozen=True)
class Kept:
    """One part without its duplicates."""

    name: str
    """Name of the source."""
    path: str
    drop: np.ndarray
    """Rows to leave out, ascending; int64 [dropped]."""
    counts: dict[str, Any]
    """Counts of the first pass."""


def drop_duplicates(
    folder: Path,
    read: Manifest,
    parts: Sequence[Part],
    fingerprint: dict[str, Any],
    options: dict[str, Any],
) -> Manifest:
    """Writes `<folder>/normalize` from the finished stage `read`."""
    # those that an earlier version read were all
    numbers = read.facts.get("numbers", range(len(parts)))
    used = [parts[number] for number in numbers]
    drops = keep_first(
        [folder / "read" / f"hashes/part-{p.number:05d}.npy" for p in used],
        [p.source.use == "eval" for p in used],
    )
    todo: list[Kept | None] = [None] * len(parts)
    for p, drop, counts in zip(used, drops, read.facts["parts"], strict=True):
        path = str(folder / "read" / part_file(p.number))
        todo[p.number] = Kept(p.name, path, drop, counts)

    def finish(counts: Sequence[dict[str, Any]], temp: Path) -> dict[str, Any]:
        hold_out(used, counts, folder / "normalize", temp)
        shutil.copyfile(folder / "read" / QUARANTINE, temp / QUARANTINE)
        return {COUNTED: read.facts[COUNTED]} if COUNTED in read.facts else {}

    return run_stage(
        "normalize",
        folder / "normalize",
        todo,
        write_kept,
        fingerprint=fingerprint,
        finish=finish,
        draw=Fixed(todo, numbers),
        **options,
    )


def keep_first(
    hashes: Sequence[Path], first: Sequence[bool], bucket_docs: int = BUCKET_DOCS
) -> list[np.ndarray]:
    """Rows of each part whose hash occurred before; int64 [dropped] each, ascending.

    hashes: .npy files of uint64 [documents, 2]. first: parts that come before the others.
    """
    tables = [np.load(path, mmap_mode="r") for path in hashes]
    order = sorted(range(len(tables)), key=lambda i: (not first[i], i))
    buckets = max(1, -(-sum(map(len, tables)) // bucket_docs))
    dropped: list[list[np.ndarray]] = [[] for _ in tables]
    for bucket in range(buckets):
        parts, owner, rows = [], [], []
        for i in order:
            mine = np.flatnonzero(tables[i][:, 0] % np.uint64(buckets) == bucket)
            parts.append(tables[i][mine])
            owner.append(np.full(len(mine), i, np.int32))
            rows.append(mine)
        pairs, owners, places = map(np.concatenate, (parts, owner, rows))
        by_hash = np.lexsort((pairs[:, 1], pairs[:, 0]))  # stable: input order within equals
        ordered = pairs[by_hash]
        again = by_hash[1:][(ordered[1:] == ordered[:-1]).all(axis=1)]
        for i in np.unique(owners[again]):
            dropped[i].append(places[again[owners[again] == i]])
    empty = np.zeros(0, np.int64)
    return [np.sort(np.concatenate([empty, *d])) for d in dropped]


def write_kept(part: Kept, tmp_dir: Path) -> dict[str, Any]:
    """Work of one part: copies the file if nothing is dropped, else writes it row group by row
    group."""
    source, target = Path(part.path), tmp_dir / Path(part.path).name
    counts = part.counts
    if not len(part.drop):
        if source.exists():
            try:
                os.link(source, target)
            except OSError:  # a disk without links
                shutil.copyfile(source, target)
        return counts
    gone: dict[str, dict[str, int]] = {}
    with TableWriter(target) as writer, pq.ParquetFile(source) as file:
        start = 0
        for i in range(file.num_row_groups):
            table = file.read_row_group(i)
            keep = np.ones(table.num_rows, bool)
            lo, hi = np.searchsorted(part.drop, (start, start + table.num_rows))
            keep[part.drop[lo:hi] - start] = False
            start += table.num_rows
            _count(table.filter(pa.array(~keep)), gone)
            if keep.any():
                writer.write_table(table.filter(pa.array(keep)))
    return _subtract(counts, gone, part.name)


def _count(table: pa.Table, into: dict[str, dict[str, int]]) -> None:
    """Adds documents and bytes per split."""
    for split in pc.unique(table["split"]).to_pylist():
        mine = table.filter(pc.equal(table["split"], split))
        entry = into.setdefault(split, {"docs": 0, "bytes": 0})
        entry["docs"] += mine.num_rows
        entry["bytes"] += pc.sum(pc.binary_length(mine["text"])).as_py()


def _subtract(counts: dict[str, Any], gone: dict[str, dict[str, int]], name: str) -> dict[str, Any]:
    rest = {}
    for split, sources in counts["sources"].items():
        less = gone.get(split, {})
        entry = {k: n - less.get(k, 0) for k, n in sources[name].items()}
        if entry["docs"]:
            rest[split] = {name: entry}
    tally = counts["input"][name] | {"duplicates": sum(e["docs"] for e in gone.values())}
    return {"sources": rest, "input": {name: tally}}
