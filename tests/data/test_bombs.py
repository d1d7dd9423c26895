"""Small inputs that unfold into a great deal: bounded memory, an end, and one sentence."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lmwright.config.run import Source
from lmwright.data.sources.columns import Row
from lmwright.data.sources.file import Slice
from lmwright.data.sources.files import find_files
from lmwright.data.sources.read import read_rows
from lmwright.errors import UserError

LONG = "x" * (1 << 22)


def parquet(path, column, **options):
    table = pa.table({"text" if pa.types.is_dictionary(column.type) else "messages": column})
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30} | options
    pq.write_table(table, path, store_schema=False, write_statistics=False, **options)


def dictionary(path):
    indices = pa.array([0] * 4096, pa.int32())
    parquet(path / "bomb.parquet", pa.DictionaryArray.from_arrays(indices, pa.array([LONG])))
    return Source(path=str(path / "bomb.parquet"))


def nested(path):
    values = pa.array([LONG[: 1 << 20]])
    words = pa.DictionaryArray.from_arrays(pa.array([0] * 8192, pa.int32()), values)
    turns = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"] * 4096), words], ["role", "content"]
    )
    column = pa.ListArray.from_arrays(pa.array(range(0, 8193, 2), pa.int32()), turns)
    parquet(path / "bomb.parquet", column)
    return Source(path=str(path / "bomb.parquet"), rows="messages")


def arrow(path):
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), pa.array([LONG]))
    table = pa.table({"text": column})
    folder = path / "saved"
    folder.mkdir()
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return Source(path=str(folder))


READ = """
import resource, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_bombs as bombs
source = getattr(bombs, {kind!r})(Path({path!r}))
from lmwright.data.sources.read import read_rows
from lmwright.data.sources.files import Slice, find_files
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(file,) = find_files(source)
count = 0
for count, row in enumerate(read_rows(Slice(file), source), 1):
    assert hasattr(row, "text"), row
    if count == 128:
        break
print(count, Path(file.path).stat().st_size, base >> 10)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.parametrize("kind", ["dictionary", "nested", "arrow"])
def test_a_column_is_unfolded_piece_by_piece(kind, tmp_path):
    code = READ.format(kind=kind, path=str(tmp_path), tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    count, size, base, peak = map(int, done.stdout.split())
    assert count == 128 and size < 1 << 23
    assert peak < base + 500, f"{base} MiB before, {peak} MiB at most"


def refused(path, within):
    (file,) = find_files(Source(path=str(path)))
    with pytest.raises(UserError, match=within) as e:
        for row in read_rows(Slice(file), Source(path=str(path))):
            assert isinstance(row, Row)
    assert path.name in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv"])
def test_nothing_but_newlines(ending, tmp_path):
    path = tmp_path / f"bomb.{ending}.zst"
    packer = zstandard.ZstdCompressor().compressobj()
    blocks = [
        packer.compress(b"text\n" * (ending != "jsonl")),
        *[packer.compress(b"\n" * (1 << 20)) for _ in range(64)],
    ]
    path.write_bytes(b"".join([*blocks, packer.flush()]))
    assert path.stat().st_size < 10_000
    refused(path, "more than 1,048,576 empty lines in a row")


def test_a_quote_that_is_never_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("lmwright.data.sources.read.CELL_CHARS", 1 << 20)
    path = tmp_path / "open.csv"
    path.write_text('text\none\n"two\n' + "three four five\n" * 200_000)
    before = csv.field_size_limit()
    try:
        refused(path, "open.csv:3: a cell is longer than 1 million characters; is a quote")
    finally:
        csv.field_size_limit(before)
