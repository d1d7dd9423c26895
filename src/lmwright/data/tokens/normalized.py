"""Normalized rows, read from the parquet files of the normalize stage."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NormalizedRow:
    """One row of the previous stage; `kind` is "text", or "labeled", "related" or "chat"
    (`text` is JSON)."""

    text: str
    source: str
    split: str
    kind: str
    id: str


def read_rows(path: Path, start: int = 0, stop: int | None = None) -> Iterator[list[NormalizedRow]]:
    """Batches of rows of about 1 MiB from row groups start..stop-1; all if unset."""
    columns = ["text", "source", "split", "rows", "id"]
    with contextlib.closing(pq.ParquetFile(path, pre_buffer=False)) as file:
        for i in range(file.num_row_groups)[start:stop]:
            group = file.metadata.row_group(i)
            size = max(1, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size))
            for batch in file.iter_batches(size, [i], columns, use_threads=False):
                values = (batch.column(c).to_pylist() for c in columns)
                yield [NormalizedRow(*row) for row in zip(*values, strict=True)]
