"""TFRecord and ArrayRecord files: written by TensorFlow, tensorboardX and array_record."""

import base64
import gzip
import hashlib
import json
import random
import struct
from pathlib import Path

import pytest

from lmwright.config.run import Source
from lmwright.data.sources.columns import Bad
from lmwright.data.sources.files import cut_parts, find_files
from lmwright.data.sources.read import read_rows
from lmwright.errors import UserError
from tests.data.user_run import RUN, command, texts

# tf.io.TFRecordWriter of TensorFlow 2.21: {text: "one", n: 7}, {text: "zwei \u00fc", score: 0.5},
# {tags: ["a", "b"]}
TENSORFLOW = base64.b64decode(
    "HwAAAAAAAABRS0QYCh0KCgoBbhIFGgMKAQcKDwoEdGV4dBIHCgUKA29uZVx3WG0qAAAAAAAAAK6N"
    "kfUKKAoRCgVzY29yZRIIEgYKBAAAAD8KEwoEdGV4dBILCgkKB3p3ZWkgw7yQ1HNdFAAAAAAAAABe"
    "PSkVChIKEAoEdGFncxIICgYKAWEKAWJQP5se"
)


def field(number, payload):
    """A protobuf field of bytes."""
    size, out = len(payload), bytearray([number << 3 | 2])
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes(out) + bytes([size]) + payload


def example(**features):
    """A serialized tf.train.Example with texts."""
    entries = b""
    for name, value in features.items():
        raw = value if isinstance(value, bytes) else value.encode()
        feature = field(1, field(1, raw))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def write_tfrecords(path, records):
    """A file by tensorboardX's writer."""
    from tensorboardX.record_writer import RecordWriter

    writer = RecordWriter(str(path))
    for record in records:
        writer.write(record)
    writer.close()
    return path


def rows_of(path, **options):
    source = Source(path=str(path), **options)
    parts = cut_parts(find_files(source), source)
    return [row for part in parts for piece in part for row in read_rows(piece, source)]


@pytest.fixture(autouse=True)
def checksums():
    pytest.importorskip("google_crc32c", reason="the extra records is not installed")


def test_what_tensorflow_wrote(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(TENSORFLOW)
    one, two, three = rows_of(tmp_path / "a.tfrecord", meta_columns=("n", "score"))
    assert (one.text, two.text) == ("one", "zwei \u00fc")
    assert json.loads(one.meta) == {"n": 7} and json.loads(two.meta) == {"score": 0.5}
    assert one.id == "a.tfrecord:1"
    assert isinstance(three, Bad) and three.missing and "no 'text', only 'tags'" in three.reason


@pytest.mark.parametrize(
    "name",
    ["__local_c4_builder-train.tfrecord-00000-of-00008", "c4-train.array_record-00000-of-00008"],
)
def test_texts_that_tensorflow_reads(shared_data, name):
    if "array" in name:
        pytest.importorskip("array_record", reason="array_record is not installed")
    read = [row.text for row in rows_of(shared_data / "text" / "c4_formats" / name)]
    # of the values that tf.data.TFRecordDataset of TensorFlow 2.21 gave
    digest = hashlib.sha256("\0".join(read).encode()).hexdigest()
    assert len(read) == 125
    assert digest == "9f15158ecd75945e4961ba115127a70f1b3149d7b675130c55743c330f82252c"


def test_names_of_shards_and_splits(tmp_path):
    for split in ("train", "validation"):
        for shard in range(2):
            name = f"c4-{split}.tfrecord-{shard:05d}-of-00002"
            write_tfrecords(tmp_path / name, [example(text=f"{split} {shard}")])
    assert [row.text for row in rows_of(tmp_path)] == ["train 0", "train 1"]
    found = rows_of(tmp_path, split="validation")
    assert [row.text for row in found] == ["validation 0", "validation 1"]
    with pytest.raises(UserError, match=r"has the splits train, validation, not 'test'"):
        rows_of(tmp_path, split="test")


def test_compressed_and_long(tmp_path):
    drawn = random.Random(0)
    wanted = ["".join(drawn.choices("abc de", k=size)) for size in (1, 127, 128, 3_000_000, 5)]
    path = write_tfrecords(tmp_path / "a.tfrecord", [example(content=text) for text in wanted])
    assert [row.text for row in rows_of(path, text_column="content")] == wanted
    packed = tmp_path / "b.tfrecord.gz"
    packed.write_bytes(gzip.compress(path.read_bytes(), 1))
    assert [row.text for row in rows_of(packed, text_column="content")] == wanted


def test_other_kinds_of_rows(tmp_path):
    record = example(instruction="Add 1 and 1.", input="", output="2")
    (row,) = rows_of(write_tfrecords(tmp_path / "a.tfrecord", [record]), rows="alpaca")
    assert "Add 1 and 1." in row.text and "2" in row.text


def test_columns_that_no_record_has(tmp_path):
    """A part that a row need not have is a wrong name if no row has it."""
    asked = example(instruction="Add 1 and 1.", response="2", context="of natural numbers")
    path = write_tfrecords(tmp_path / "a.tfrecord", [b"\xff", asked, asked])
    named = {"instruction": "instruction", "output": "response", "input": "contxt"}
    with pytest.raises(
        UserError, match=r"none of the first 2 rows has 'contxt', only '\w+', .*; ch"
    ):
        rows_of(path, rows="alpaca", columns=named)
    *_, row = rows_of(path, rows="alpaca", columns=named | {"input": "context"})
    assert "natural numbers" in row.text


def test_bad_records_are_rows(tmp_path):
    records = [b"\xff\xff no example", example(text=b"a\xffb"), example(text="good"), b""]
    path = write_tfrecords(tmp_path / "a.tfrecord", records)
    first, second, third, empty = rows_of(path)
    assert first.reason == "not a tf.train.Example"
    assert second.reason == "invalid UTF-8 in 'text'" and third.text == "good"
    assert empty.missing


@pytest.mark.parametrize("damage", ["length", "record", "checksum", "cut", "cut length", "huge"])
def test_damaged_and_truncated(tmp_path, damage):
    path = write_tfrecords(tmp_path / "a.tfrecord", [example(text="one"), example(text="two")])
    raw = bytearray(path.read_bytes())
    half = len(raw) // 2
    if damage == "huge":
        import google_crc32c

        length = struct.pack("<Q", 1 << 40)
        crc = google_crc32c.value(length)
        crc = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        raw = length + struct.pack("<I", crc) + raw
    elif damage.startswith("cut"):
        del raw[-3 if damage == "cut" else half + 5 :]
    else:
        raw[half + {"length": 0, "record": 14, "checksum": half - 2}[damage]] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"a\.tfrecord( is truncated or damaged|: a record is lo)"):
        rows_of(path)


def test_a_run_reads_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tfrecords(Path("words.tfrecord"), [example(text=t) for t in texts(60)])
    Path("run.toml").write_text(RUN.replace("PATH", "words.tfrecord"))
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 0 and "words" in said
    raw = Path("words.tfrecord").read_bytes()
    Path("words.tfrecord").write_bytes(raw[:-9])
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 2 and "words.tfrecord is truncated or damaged (it ends within" in said


def write_array_records(path, records):
    module = pytest.importorskip(
        "array_record.python.array_record_module", reason="array_record is not installed"
    )
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_array_records(tmp_path):
    wanted = texts(200)
    name = "c4-train.array_record-00000-of-00001"
    path = write_array_records(tmp_path / name, [example(text=text) for text in wanted])
    assert [row.text for row in rows_of(path)] == wanted
    raw = path.read_bytes()
    for cut in (len(raw) - 7, len(raw) // 2, 10):
        path.write_bytes(raw[:cut])
        with pytest.raises(UserError, match=r"is truncated or damaged .the index at its end"):
            rows_of(path)
    path.write_bytes(raw[:3000] + bytes([raw[3000] ^ 1]) + raw[3001:])
    with pytest.raises(UserError, match=r"is truncated or damaged .*hash mismatch"):
        rows_of(path)


def test_array_records_elsewhere(tmp_path):
    path = tmp_path / "a.array_record.gz"
    path.write_bytes(b"")
    with pytest.raises(UserError, match="must not be compressed once more"):
        rows_of(path)
