"""Columnar: rows of parquet and Arrow files, in bounded memory whatever their encoding.

    row group --decode--> batch --row_sizes--> slices of a few MiB --> Row | Bad

A dictionary of one long text may stand for thousands of rows in a file of some hundred bytes:
columns stay dictionaries until they are cut.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lmwright.config.run import Source
from lmwright.data.sources.columns import (
    Bad,
    Row,
    check_header,
    from_columns,
    select_columns,
    takes_lists,
)
from lmwright.data.sources.file import (
    DOCUMENT_BYTES,
    READ_BYTES,
    File,
    Slice,
    open_binary,
    stream,
)
from lmwright.errors import UserError

BATCH_BYTES = 8 << 20
BATCH_ROWS = 4096
TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
BINARY_TYPES = (*TEXT_TYPES, pa.types.is_binary, pa.types.is_large_binary)
LIST_TYPES = (pa.types.is_list, pa.types.is_large_list, pa.types.is_map)
DELTA = "DELTA_BYTE_ARRAY"  # each value may repeat all of the one before


def read_columns(piece: Slice, source: Source) -> Iterator[Row | Bad]:
    """Rows of parquet row groups or of an Arrow file."""
    number = piece.first_row
    batches = _parquet if piece.file.format == "parquet" else _arrow
    for batch in _slices(batches(piece, source), piece.file):
        names = batch.schema.names
        columns = [_values(batch.column(n)) for n in names]
        for values in zip(*columns, strict=True):
            number += 1
            row = dict(zip(names, values, strict=True))
            if broken := [n for n, value in row.items() if isinstance(value, _Broken)]:
                yield Bad(number, f"{row[broken[0]].what} in {broken[0]!r}")
            else:
                yield from_columns(row, number, piece.file, source)


@dataclass(frozen=True)
class _Broken:
    """A value that Python cannot hold."""

    what: str


def _values(column: pa.Array) -> list[Any]:
    """Python values of a column; strings that are not valid UTF-8, and times outside the years 1 to
    9999, become _Broken."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError) as error:
        if isinstance(error, pa.ArrowException):
            raise
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _Broken("invalid UTF-8")
    except (ValueError, OverflowError) as error:
        if isinstance(error, pa.ArrowException):
            raise
        return _Broken(f"a value out of range ({error})")


def _parquet(piece: Slice, source: Source) -> Iterator[pa.RecordBatch]:
    file = piece.file
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open_binary(file.path))
        if file.compression:  # parquet needs to seek, so it is unpacked first
            raw = _unpack(file, stack.enter_context(tempfile.TemporaryFile()))
        parquet = pq.ParquetFile(raw, pre_buffer=False, buffer_size=READ_BYTES)
        names = _check_schema(parquet.schema_arrow, file, source)
        metadata = parquet.metadata
        groups = range(piece.start, metadata.num_row_groups if piece.stop is None else piece.stop)
        chunks = [_chunks(metadata.row_group(i), names) for i in groups]
        encoded = {c.path_in_schema for columns in chunks for c in columns if c.has_dictionary_page}
        raw.seek(0)
        parquet = pq.ParquetFile(
            raw, pre_buffer=False, buffer_size=READ_BYTES, read_dictionary=sorted(encoded)
        )
        for i, columns in zip(groups, chunks, strict=True):
            size = _batch_rows(metadata.row_group(i), columns)
            yield from parquet.iter_batches(size, row_groups=[i], columns=names, use_threads=False)


def _chunks(group: Any, names: list[str]) -> list[Any]:
    """Metadata of the columns below the requested ones."""
    columns = (group.column(i) for i in range(group.num_columns))
    return [c for c in columns if c.path_in_schema.split(".")[0] in names]


def _batch_rows(group: Any, chunks: list[Any]) -> int:
    row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
    size = min(BATCH_ROWS, max(1, BATCH_BYTES // row_bytes))
    for chunk in chunks:
        if DELTA in chunk.encodings:
            size = min(size, max(1, 16 * BATCH_BYTES // max(1, chunk.total_uncompressed_size)))
    return size


def _slices(batches: Iterator[pa.RecordBatch], file: File) -> Iterator[pa.RecordBatch]:
    """Batches with the same rows, each with about BATCH_BYTES of values, or one row."""
    for batch in batches:
        sizes = sum((row_sizes(column) for column in batch.columns), np.zeros(batch.num_rows))
        if batch.num_rows and sizes.max() > DOCUMENT_BYTES:
            raise UserError(
                f"{file.path}: a row is longer than {DOCUMENT_BYTES >> 30} GiB; split it"
            )
        ends = np.cumsum(sizes)
        at = 0
        while at < batch.num_rows:
            before = ends[at - 1] if at else 0
            stop = max(at + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
            yield batch.slice(at, stop - at)
            at = stop


def row_sizes(column: pa.Array) -> np.ndarray:
    """Bytes of the Python values of each row, float64 [rows]."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        values = row_sizes(column.dictionary)
        if not len(values):
            return np.zeros(len(column))
        return values[column.indices.fill_null(0).to_numpy(zero_copy_only=False)]
    if pa.types.is_string_view(kind):  # 16 bytes each, the length in the first four
        views = np.frombuffer(column.buffers()[1] or b"", "<i4").reshape(-1, 4)[:, 0]
        return views[column.offset : column.offset + len(column)].astype(float)
    if any(is_binary(kind) for is_binary in BINARY_TYPES):
        return pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(float)
    if any(is_list(kind) for is_list in LIST_TYPES):
        offsets = column.offsets.to_numpy(zero_copy_only=False)
        first, last = int(offsets[0]), int(offsets[-1])
        parts = [column.keys, column.items] if pa.types.is_map(kind) else [column.values]
        inner = sum(row_sizes(part.slice(first, last - first)) for part in parts)
        return np.diff(np.concatenate([[0], np.cumsum(inner)])[offsets - first])
    if pa.types.is_struct(kind):
        return sum((row_sizes(f) for f in column.flatten()), np.zeros(len(column)))
    return np.full(len(column), 8.0)


def _unpack(file: File, into: Any) -> Any:
    """Temporary file `into`, filled with the file's content and rewound."""
    for block in stream(file):
        with _temporary_space(file):
            into.write(block)
    with _temporary_space(file):
        into.seek(0)
    return into


@contextlib.contextmanager
def _temporary_space(file: File) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise UserError(
            f"{tempfile.gettempdir()}: cannot hold {file.path} unpacked ({e.strerror or e}); set "
            "TMPDIR to a folder with more space, or unpack the file yourself"
        ) from None


def _arrow(piece: Slice, source: Source) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(piece.file.path) as raw, pa.ipc.open_stream(raw) as reader:
        names = _check_schema(reader.schema, piece.file, source)
        for batch in reader:
            batch = batch.select(names)
            for column in batch.columns:
                _validate(column)
            yield batch


def _validate(column: pa.Array) -> None:
    """Raises ArrowInvalid for offsets outside the data, which Arrow would follow into other
    memory."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as e:
        if "UTF8" not in str(e):  # which is a matter of single rows
            raise


def _check_schema(schema: pa.Schema, file: File, source: Source) -> list[str]:
    """Columns to read. Raises UserError unless those that the source names exist."""
    check_header(schema.names, file, source)
    names = select_columns(source, schema.names)
    if source.rows != "text":
        return names
    kind = schema.field(source.text_column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    kinds = (*TEXT_TYPES, *LIST_TYPES[:2]) if takes_lists(source) else TEXT_TYPES
    if not any(is_one(kind) for is_one in kinds):
        raise UserError(
            f"{file.path}: column {source.text_column!r} is {kind}, not text; "
            "change data.sources.text_column"
        )
    return names
