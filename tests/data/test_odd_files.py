"""Odd files are read or refused in one sentence: long cells, double columns, times, names."""

import csv
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.config.run import Source
from lmwright.data.sources.files import find_files
from lmwright.errors import UserError
from tests.data.test_sources import read, texts_of


def test_times_that_python_cannot_hold_are_bad_rows(tmp_path):
    """The years of Arrow's times go on after 9999."""
    times = pa.array([0, 2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["a", "b"], "at": times}), tmp_path / "a.parquet")
    first, last = read(Source(path=str(tmp_path), meta_columns=("at",)))
    assert first.meta == '{"at": "1970-01-01 00:00:00"}'
    assert (last.number, "out of range" in last.reason, "'at'" in last.reason) == (2, True, True)


def test_cells_of_any_length_are_read_from_tsv_too(tmp_path, monkeypatch):
    """Also where no csv was read before, which sets the limit of the process."""
    (tmp_path / "a.tsv").write_text(f"id\ttext\n1\t{'x' * 200_000}\n")
    csv.field_size_limit(1 << 17)  # that of Python
    assert texts_of(read(Source(path=str(tmp_path / "a.tsv")))) == ["x" * 200_000]
    monkeypatch.setattr("lmwright.data.sources.read.CELL_CHARS", 1000)
    with pytest.raises(UserError, match=r"a\.tsv:2: a cell is longer .*; split it"):
        read(Source(path=str(tmp_path / "a.tsv")))


@pytest.mark.parametrize("format_", ["csv", "parquet"])
def test_a_column_that_is_there_twice(tmp_path, format_):
    """Which of them holds the text, nobody knows; twice of another column does no harm."""
    table = pa.table([pa.array([each]) for each in "abcd"], ["text", "text", "n", "n"])
    if format_ == "csv":
        (tmp_path / "a.csv").write_text("text,text,n,n\na,b,c,d\n")
    else:
        pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has 2 columns called 'text'; rename all but one"):
        read(Source(path=str(tmp_path)))


def test_names_of_files_need_not_be_text(tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "wb") as file:
        file.write(b"tea")
    (row,) = read(Source(path=str(tmp_path)))
    assert (row.text, row.id.encode()) == ("tea", rb"caf\xe9.txt")


def test_lines_that_a_stray_quote_swallows_are_bad_rows(tmp_path):
    """They count, so that a file is not lost without a word."""
    lines = [f"{i},line {i}\n" for i in range(20)]
    lines[4], lines[9] = '4,"line 4\n', '9,"line 9\n'
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(lines))
    rows = read(Source(path=str(tmp_path / "a.csv")))
    bad = {row.number: row.reason for row in rows if not hasattr(row, "text")}
    assert set(bad) == set(range(6, 12)) and len(rows) == 20
    assert all("is a quote never closed?" in reason for reason in bad.values())
    lines[9] = "9,line 9\n"
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(lines))
    assert texts_of(read(Source(path=str(tmp_path / "a.csv")))[:4]) == [
        f"line {i}" for i in range(4)
    ]
    assert len(read(Source(path=str(tmp_path / "a.csv")))) == 20


def test_cells_that_are_parted_otherwise_are_told(tmp_path):
    (tmp_path / "a.csv").write_text("id;text\n1;a\n")
    with pytest.raises(UserError, match="parted by semicolons: save it with commas, or with tabs"):
        read(Source(path=str(tmp_path / "a.csv")))


def test_a_link_to_nothing_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "none.txt")
    with pytest.raises(UserError, match=r"b\.txt is a link to nothing; repair or remove it"):
        read(Source(path=str(tmp_path)))


def test_what_is_packed_otherwise_and_what_lies_in_the_store_are_told(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    source = Source(path=str(tmp_path))
    with pytest.raises(UserError, match=r"lie in data\.dir, .*; choose another data\.dir"):
        find_files(source, tmp_path)
    (tmp_path / "a.txt").rename(tmp_path / "a.txt.xz")
    with pytest.raises(UserError, match=r"is packed as \.xz, which is not read; unpack it"):
        find_files(source)


@pytest.mark.parametrize("mark", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.tsv", "a.json"])
def test_files_in_utf16_are_told_with_their_cure(name, mark, tmp_path):
    (tmp_path / name).write_text('\ufeff{"text": "tea"}\n', mark)
    cure = f"is UTF-16; .* `iconv -f UTF-16 -t UTF-8 .*/{name} > utf8"
    with pytest.raises(UserError, match=cure):
        read(Source(path=str(tmp_path / name), format="json" if name == "a.json" else "auto"))


@pytest.mark.parametrize(
    ("encoding", "named"),
    [("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE"), ("utf-32", "UTF-32")],
)
@pytest.mark.parametrize("text", ["tea\n", "\u00dcber den Tee\n" * 1000])
def test_wide_characters_without_a_mark_are_told(encoding, named, text, tmp_path):
    """In UTF-8 their zeros are characters, which were learned."""
    (tmp_path / "a.txt").write_text(text, encoding)
    with pytest.raises(UserError, match=f"is {named}; .* `iconv -f {named} -t UTF-8 "):
        read(Source(path=str(tmp_path / "a.txt")))
    few = "tea\0 with\0 some\0 zeros\0\n"
    (tmp_path / "a.txt").write_text(few)
    assert texts_of(read(Source(path=str(tmp_path / "a.txt")))) == [few]


def test_packed_data_beside_other_files_is_told(tmp_path):
    """It was left out without a word; archives of something else still are."""
    (tmp_path / "a.jsonl").write_text('{"text": "tea"}\n')
    (tmp_path / "images.zip").write_bytes(b"PK")
    assert texts_of(read(Source(path=str(tmp_path)))) == ["tea"]
    (tmp_path / "b.jsonl.bz2").write_bytes(b"BZh9")
    with pytest.raises(UserError, match=r"b\.jsonl\.bz2 is packed as \.bz2, .* by a glob"):
        find_files(Source(path=str(tmp_path)))
    assert texts_of(read(Source(path=str(tmp_path / "*.jsonl")))) == ["tea"]


def test_quotes_of_csv_in_tsv_are_told(tmp_path):
    """As pandas writes a cell with quotes in it: they were learned, and doubled."""
    plain = ['a "b" c', '"a b"', '"a', '""', '"', '"a" and "b"', '""a""']
    with (tmp_path / "a.tsv").open("w", newline="") as file:
        file.write("".join(f"{text}\n" for text in ["text", *plain]))
        csv.writer(file, delimiter="\t").writerow(['say "hi" now'])
    *rows, last = read(Source(path=str(tmp_path / "a.tsv")))
    assert texts_of(rows) == plain
    assert last.number == 9 and last.reason.startswith("a cell in quotes, as of csv")


def test_an_arrow_file_names_the_folder_as_the_cure(tmp_path):
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"\xff\xff\xff\xff")
    with pytest.raises(UserError, match=r"an Arrow file, .* save_to_disk; give that folder"):
        find_files(Source(path=str(tmp_path / "data-00000-of-00001.arrow")))


def test_a_list_in_place_of_lines_is_told(tmp_path):
    (tmp_path / "a.jsonl").write_text('[\n {"text": "tea"},\n {"text": "cake"}\n]\n')
    with pytest.raises(UserError, match=r"a JSON list, .* set data.sources.format = 'json'"):
        read(Source(path=str(tmp_path / "a.jsonl")))
    assert texts_of(read(Source(path=str(tmp_path / "a.jsonl"), format="json"))) == ["tea", "cake"]


def test_ends_of_lines_of_old_macs_are_told(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text\rtea\rcake\r")
    with pytest.raises(UserError, match=r"end with CR only, .* `tr '\\r' '\\n' < "):
        read(Source(path=str(tmp_path / "a.csv")))
