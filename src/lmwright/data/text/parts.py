"""Parts: the input of one part, and the parquet file of rows that it becomes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lmwright.config.run import Source
from lmwright.data.sources.file import Slice

NAMES = ("id", "text", "source", "meta", "split", "rows")
SCHEMA = pa.schema([(n, pa.large_string()) for n in NAMES])
COUNTED = "sampled"
"""Key of a part's counts: by source, its tokens, and the most that it was to have."""
GROUP_BYTES = 8 << 20
GROUP_ROWS = 8192


@dataclass(frozen=True)
class Counting:
    """Settings for counting the tokens of a sample."""

    folder: str
    """Folder of the tokenizer."""
    fingerprint: str
    route: str
    around: int
    """Tokens that are put before and after a document."""


@dataclass(frozen=True)
class Part:
    """Input of one part and the settings to read it."""

    number: int
    name: str
    """Name of the source."""
    source: Source
    slices: tuple[Slice, ...]
    unicode: str
    holdout_fraction: float
    hashes: bool
    """True to write the hash of each document as well."""
    most_tokens: int | None = None
    """Tokens after which it ends, where its source is sampled."""
    counting: Counting | None = None
    portion: int | None = None
    """Number of the portion, whose training documents alone are counted. Held-out documents are
    those of the first one."""
    skip_rows: int = 0
    """Rows that belong to an earlier portion."""

    def holds_out(self, digest: bytes) -> bool:
        """True for a document, of this xxh3_128 of its text, that is kept for evaluation."""
        held_out = int.from_bytes(digest[:8], "big") < self.holdout_fraction * 2.0**64
        return held_out or self.source.use == "eval"


def part_file(number: int) -> str:
    """Path of a part's rows below the stage's folder."""
    return f"part-{number:05d}.parquet"


class TableWriter:
    """Writes rows as parquet in bounded memory; no file if there are no rows."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[tuple[str, ...]] = []
        self.size = 0
        self.writer: pq.ParquetWriter | None = None

    def write(self, row: tuple[str, ...], size: int) -> None:
        """Adds one row of SCHEMA whose text has `size` bytes."""
        self.rows.append(row)
        self.size += size
        if self.size >= GROUP_BYTES or len(self.rows) >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self.rows:
            return
        columns = [pa.array(c, pa.large_string()) for c in zip(*self.rows, strict=True)]
        self.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
        self.rows, self.size = [], 0

    def write_table(self, table: pa.Table) -> None:
        """Writes a row group."""
        if self.writer is None:
            self.writer = pq.ParquetWriter(
                self.path,
                SCHEMA,
                compression="zstd",
                use_dictionary=["source", "split", "rows"],
                write_statistics=False,
            )
        self.writer.write_table(table)

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._flush()
        if self.writer is not None:
            self.writer.close()
