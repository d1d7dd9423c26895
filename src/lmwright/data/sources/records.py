"""Records: TFRecord and ArrayRecord files of `tf.train.Example`, without TensorFlow.

    TFRecord     length uint64 | crc uint32 of it | bytes | crc uint32 of them     one after another
    ArrayRecord  read by its own library (extra `records`)

https://www.tensorflow.org/tutorials/load_data/tfrecord. A record whose checksum differs damages the
file; one that is no Example, or whose text is not UTF-8, is a bad row.
"""

import functools
import os
import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from lmwright.config.run import Source
from lmwright.data.sources.columns import Bad, Chosen, Row, from_mapping, select_columns
from lmwright.data.sources.file import DOCUMENT_BYTES, File, stream
from lmwright.errors import UserError, install

MASK_DELTA = 0xA282EAD8
BATCH_RECORDS = 64
TYPES = descriptor_pb2.FieldDescriptorProto
LISTS = {
    "bytes_list": ("BytesList", TYPES.TYPE_BYTES),
    "float_list": ("FloatList", TYPES.TYPE_FLOAT),
    "int64_list": ("Int64List", TYPES.TYPE_INT64),
}


def read_records(file: File, source: Source) -> Iterator[Row | Bad]:
    """Documents of a file whose records are Examples."""
    records = _tfrecords(file) if file.format == "tfrecord" else _array_records(file)
    chosen = Chosen(file, source)
    for number, record in enumerate(records, 1):
        try:
            row = _example(record, source)
            chosen.look(row)
        except DecodeError:
            yield Bad(number, "not a tf.train.Example")
        except UnicodeDecodeError as error:
            yield Bad(number, f"invalid UTF-8 in {error.reason!r}")
        else:
            yield from_mapping(row, number, file, source)
    chosen.end()


def _example(record: bytes, source: Source) -> dict[str, Any]:
    """Features that a source names, as text, numbers or lists of these; others are None."""
    features = _example_type().FromString(record).features.feature
    row: dict[str, Any] = dict.fromkeys(features)
    for name in select_columns(source, features):
        if name in row:
            row[name] = _value(features[name], name)
    return row


def _value(feature: Any, name: str) -> Any:
    kind = feature.WhichOneof("kind")
    values = list(getattr(feature, kind).value) if kind else []
    if kind == "bytes_list":
        try:
            values = [value.decode() for value in values]
        except UnicodeDecodeError as error:
            raise UnicodeDecodeError("utf-8", b"", error.start, error.end, name) from None
    return values[0] if len(values) == 1 else values


def _tfrecords(file: File) -> Iterator[bytes]:
    checksum, blocks = _checksum(file), _Bytes(file)
    while header := blocks.read(12, "the length of a record", may_end=True):
        length, of_length = struct.unpack("<QI", header)
        if checksum(header[:8]) != of_length:
            raise OSError(f"the checksum of the length at byte {blocks.at - 12:,} differs")
        if length > DOCUMENT_BYTES:
            raise UserError(
                f"{file.path}: a record is longer than {DOCUMENT_BYTES >> 30} GiB; split it"
            )
        record = blocks.read(length, "a record")
        (of_record,) = struct.unpack("<I", blocks.read(4, "a checksum"))
        if checksum(record) != of_record:
            raise OSError(f"the checksum of the record before byte {blocks.at:,} differs")
        yield record


def _checksum(file: File) -> Any:
    """Masked CRC32C of bytes, as TFRecord has it."""
    try:
        import google_crc32c
    except ImportError:
        raise UserError(
            f"{file.path}: TFRecord needs google-crc32c; {install('records')}"
        ) from None

    def masked(raw: bytes) -> int:
        crc = google_crc32c.value(raw)
        return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF

    return masked


class _Bytes:
    """Content of a file, in pieces of any size."""

    def __init__(self, file: File):
        self._blocks, self._rest, self.at = stream(file), bytearray(), 0

    def read(self, count: int, what: str, may_end: bool = False) -> bytes:
        """The next `count` bytes; none at the end where it may be one. Raises EOFError."""
        while len(self._rest) < count:
            block = next(self._blocks, None)
            if block is None:
                if may_end and not self._rest:
                    return b""
                raise EOFError(f"it ends within {what} at byte {self.at + len(self._rest):,}")
            self._rest += block
        piece = bytes(self._rest[:count])
        del self._rest[:count]
        self.at += count
        return piece


def _array_records(file: File) -> Iterator[bytes]:
    if "://" in file.path or file.compression:
        why = "lie on this machine" if "://" in file.path else "not be compressed once more"
        raise UserError(f"{file.path}: an ArrayRecord file must {why}; copy or unpack it first")
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError:
        raise UserError(
            f"{file.path}: ArrayRecord needs array_record; {install('records')}"
        ) from None
    os.stat(file.path)  # its library says less about one that is missing
    try:
        reader = ArrayRecordReader(file.path)
        if not reader.ok():
            raise OSError("the index at its end is not there")
        count = reader.num_records()
        for start in range(0, count, BATCH_RECORDS):
            yield from reader.read(start, min(start + BATCH_RECORDS, count))
    except (RuntimeError, ValueError, IndexError) as error:
        raise OSError(str(error)) from None


@functools.lru_cache(1)
def _example_type() -> Any:
    """Class of `tf.train.Example`, a map of names to lists of bytes, floats or integers."""
    file = descriptor_pb2.FileDescriptorProto(
        name="lmwright/example.proto", package="lmwright.example", syntax="proto3"
    )

    def message(name: str) -> Any:
        return file.message_type.add(name=name)

    def add(to: Any, name: str, number: int, kind: int, of: str = "", many: bool = False) -> Any:
        label = TYPES.LABEL_REPEATED if many else TYPES.LABEL_OPTIONAL
        of_type = f".lmwright.example.{of}" if of else None
        return to.field.add(name=name, number=number, type=kind, label=label, type_name=of_type)

    for name, kind in LISTS.values():
        add(message(name), "value", 1, kind, many=True)
    feature = message("Feature")
    feature.oneof_decl.add(name="kind")
    for number, (field, (name, _)) in enumerate(LISTS.items(), 1):
        add(feature, field, number, TYPES.TYPE_MESSAGE, name).oneof_index = 0
    features = message("Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, TYPES.TYPE_STRING)
    add(entry, "value", 2, TYPES.TYPE_MESSAGE, "Feature")
    add(features, "feature", 1, TYPES.TYPE_MESSAGE, "Features.FeatureEntry", many=True)
    add(message("Example"), "features", 1, TYPES.TYPE_MESSAGE, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("lmwright.example.Example"))
