"""Every format and compression gives the same documents; damage is named; cuts lose nothing."""

import csv
import gzip
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmwright.config.run import Source
from lmwright.data.sources import read as rows_module
from lmwright.data.sources.files import cut_parts, find_files
from lmwright.data.sources.read import Bad, Row, read_rows
from lmwright.errors import UserError

TEXTS = [
    "plain",
    'quo"te, comma',
    "tab-free\\n",
    "\u00e9\u4f60\U0001f600",
    "  spaces  ",
    "a" * 5000,
]


def write_csv(texts, newline="\r\n"):
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=newline)
    writer.writerows([["n", "text"], *([i, t] for i, t in enumerate(texts))])
    return out.getvalue().encode()


def write_parquet(texts, group_rows=4, **extra):
    out = io.BytesIO()
    table = pa.table({"n": range(len(texts)), "text": texts, **extra})
    pq.write_table(table, out, row_group_size=group_rows)
    return out.getvalue()


WRITERS = {
    "txt": lambda texts: "".join(f"{t}\n" for t in texts).encode(),
    "jsonl": lambda texts: b"".join(
        json.dumps({"n": i, "text": t}, ensure_ascii=i % 2 == 0).encode() + b"\n"
        for i, t in enumerate(texts)
    ),
    "csv": write_csv,
    "tsv": lambda texts: (
        b"n\ttext\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(texts)).encode()
    ),
    "parquet": write_parquet,
}
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def read(source, exclude=None, part_bytes=1 << 20):
    files = find_files(source, exclude)
    return [
        row
        for part in cut_parts(files, source, part_bytes)
        for piece in part
        for row in read_rows(piece, source)
    ]


def texts_of(rows):
    assert all(isinstance(r, Row) for r in rows), [r for r in rows if isinstance(r, Bad)]
    return [r.text for r in rows]


@pytest.mark.parametrize("format_", WRITERS)
@pytest.mark.parametrize("packer", PACKERS)
def test_every_format_and_compression_gives_the_same_texts(tmp_path, format_, packer):
    path = tmp_path / f"a.{format_}{packer}"
    path.write_bytes(PACKERS[packer](WRITERS[format_](TEXTS)))
    source = Source(path=str(path), documents="line", meta_columns=("n",) * (format_ != "txt"))
    rows = read(source)
    assert texts_of(rows) == TEXTS
    assert len({r.id for r in rows}) == len(rows)
    if format_ != "txt":
        assert [int(json.loads(r.meta)["n"]) for r in rows] == list(range(len(TEXTS)))


@pytest.mark.parametrize("format_", WRITERS)
def test_from_a_url(format_):
    fs = fsspec.filesystem("memory")
    fs.pipe(f"/sources-{format_}/x/a.{format_}", WRITERS[format_](TEXTS[:3]))
    fs.pipe(f"/sources-{format_}/b.{format_}", WRITERS[format_](TEXTS[3:]))
    for path in (f"memory://sources-{format_}", f"memory://sources-{format_}/**/*.{format_}"):
        rows = read(Source(path=path, documents="line"))
        assert sorted(texts_of(rows)) == sorted(TEXTS)
    (row, *_) = read(Source(path=f"memory://sources-{format_}/x/a.{format_}", documents="line"))
    assert row.text == TEXTS[0] and row.id.startswith(f"a.{format_}:")


class RangeHandler(BaseHTTPRequestHandler):
    """A static file server on loopback that knows ranges."""

    content: ClassVar[dict[str, bytes]] = {}

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        raw = self.content.get(self.path)
        if raw is None:
            self.send_error(404)
            return
        start, stop = 0, len(raw)
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            start, stop = int(first), min(len(raw), int(last) + 1 if last else len(raw))
        self.send_response(206 if wanted else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"one"')
        self.send_header("Content-Length", str(stop - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(raw)}")
        self.end_headers()
        if body:
            self.wfile.write(raw[start:stop])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), RangeHandler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv.gz", "a.parquet", "a.txt.zst"])
def test_over_http(server, name):
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp")
    format_, packer = name.split(".")[1], "." + name.split(".")[2] if name.count(".") > 1 else ""
    RangeHandler.content = {f"/d/{name}": PACKERS[packer](WRITERS[format_](TEXTS))}
    source = Source(path=f"{server}/d/{name}", documents="line")
    (file,) = find_files(source)
    assert file.stamp == '"one"'
    assert texts_of(read(source)) == TEXTS
    with pytest.raises(UserError, match="missing"):
        read(Source(path=f"{server}/d/missing.jsonl"))


def test_documents_of_a_text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n \nthree\n\nfour")
    found = {d: read(Source(path=str(path), documents=d)) for d in ("file", "line", "paragraph")}
    assert texts_of(found["file"]) == ["one\r\ntwo\n\n \nthree\n\nfour"]
    assert [(r.number, r.text) for r in found["line"]] == [
        (1, "one"),
        (2, "two"),
        (5, "three"),
        (7, "four"),
    ]
    assert [(r.number, r.text) for r in found["paragraph"]] == [
        (1, "one\r\ntwo"),
        (5, "three"),
        (7, "four"),
    ]


def test_a_folder_takes_what_its_format_means(tmp_path):
    for name in ("b.py", "a/c.md", "a/d.txt", "e.jsonl", "f.bin", ".g.txt", "__pycache__/h.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    names = lambda source, **k: [f.name for f in find_files(source, **k)]  # noqa: E731
    assert names(Source(path=str(tmp_path), format="txt")) == ["b.py", "a/c.md", "a/d.txt"]
    assert names(Source(path=str(tmp_path))) == ["e.jsonl", "a/d.txt"]
    assert names(Source(path=str(tmp_path), format="txt"), exclude=tmp_path / "a") == ["b.py"]
    assert names(Source(path=f"{tmp_path}/**/*.md", format="txt")) == ["a/c.md"]
    assert names(Source(path=str(tmp_path / "f.bin"), format="txt")) == ["f.bin"]


def test_splits_side_by_side(tmp_path):
    for name in ("train-00000.jsonl", "train-00001.jsonl", "test-00000.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    source = Source(path=str(tmp_path))
    assert [f.name for f in find_files(source)] == ["train-00000.jsonl", "train-00001.jsonl"]
    test = Source(path=str(tmp_path), split="test")
    assert [f.name for f in find_files(test)] == ["test-00000.jsonl"]
    with pytest.raises(UserError, match="splits test, train"):
        find_files(Source(path=str(tmp_path), split="dev"))


def test_saved_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "d")
    assert texts_of(read(Source(path=str(tmp_path / "d"), meta_columns=("n",)))) == TEXTS
    assert texts_of(read(Source(path=str(tmp_path / "d"), split="test"))) == TEXTS[1:2]
    assert texts_of(read(Source(path=str(tmp_path / "d/train")))) == TEXTS
    with pytest.raises(UserError, match="splits train, test"):
        read(Source(path=str(tmp_path / "d"), split="dev"))


lines = st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=60)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines, st.integers(8, 200), st.sampled_from(["jsonl", "txt", "parquet"]))
def test_cuts_lose_and_move_nothing(tmp_path, texts, part_bytes, format_):
    if format_ == "txt":
        texts = [t for text in texts for t in text.replace("\r", "").split("\n") if t.strip()]
        if not texts:
            return
    path = tmp_path / f"a.{format_}"
    path.write_bytes(WRITERS[format_](texts))
    source = Source(path=str(path), documents="line")
    whole = read(source, part_bytes=1 << 30)
    assert texts_of(whole) == texts
    assert read(source, part_bytes=part_bytes) == whole


def test_large_files_are_cut_and_small_ones_put_together(tmp_path):
    big = tmp_path / "a.jsonl"
    big.write_bytes(WRITERS["jsonl"](["x" * 90] * 100))
    for i in range(30):
        (tmp_path / f"b{i:02d}.jsonl").write_bytes(WRITERS["jsonl"](["y" * 60]))
    source = Source(path=str(tmp_path))
    parts = cut_parts(find_files(source), source, 1000)
    assert 10 < len([p for p in parts if p[0].file.name == "a.jsonl"]) < 15
    assert max(len(p) for p in parts) > 5
    assert len(read(source, part_bytes=1000)) == 130


def test_every_beginning_of_a_line_of_json_is_one_that_ends_within_it(tmp_path):
    line = json.dumps(
        {"text": 'a "b" \u00e9\n', "n": [-1.5, 2e-3, True, False, None], "o": {"p": 1}}
    )
    path = tmp_path / "a.jsonl"
    for end in ("\n", "\r\n"):
        path.write_text("".join(line[:n] + end for n in range(1, len(line))), newline="")
        told = {row.reason for row in read(Source(path=str(path)))}
        assert told == {"invalid JSON: the line ends within it"}
    path.write_text('{"text" "a"}\n{"text": "a"} {\n{"text": a"}\n{"text": "a\tb"}\n')
    told = [row.reason for row in read(Source(path=str(path)))]
    assert len(told) == 4 and not any("ends within" in reason for reason in told)
    (tmp_path / "a.json").write_text('[{"text": "a"},\n {"te')
    with pytest.raises(UserError, match=r"not valid JSON \(the file ends within it\)"):
        read(Source(path=str(tmp_path / "a.json"), format="json"))


def test_bad_rows_are_told_with_line_and_reason(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n{"text": "cut\n{"text": "\xff"}\n[1]\n{"other": 1}\n'
        b'{"text": null}\n{"text": ["a"]}\n{"text": "\\ud83d"}\n\n{"text": "good"}'
    )
    rows = read(Source(path=str(path)))
    assert [(r.number, r.text) for r in rows if isinstance(r, Row)] == [(1, "good"), (10, "good")]
    reasons = {r.number: r.reason for r in rows if isinstance(r, Bad)}
    expected = {
        2: "invalid JSON: the line ends within it",
        3: "invalid UTF-8 at byte 11",
        4: "a list, not an object",
        5: "no 'text', only 'other'",
        6: "is null",
        7: "is a list",
        8: "surrogate",
    }
    assert reasons.keys() == expected.keys()
    assert all(what in reasons[n] for n, what in expected.items()), reasons
    assert reasons[4] == "a list, not an object"


def test_bad_cells(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,"two\nlines"\n2\n3,a,b\n4,\xff\n5,"a"b\n6,end\n')
    rows = read(Source(path=str(path), id_column="id"))
    assert [(r.number, r.id, r.text) for r in rows if isinstance(r, Row)] == [
        (2, "1", "two\nlines"),
        (8, "6", "end"),
    ]
    assert [(r.number, r.reason[:12]) for r in rows if isinstance(r, Bad)] == [
        (4, "1 cells inst"),
        (5, "3 cells inst"),
        (6, "invalid UTF-"),
        (7, "invalid csv:"),
    ]


def test_bad_parquet_values(tmp_path):
    offsets = pa.py_buffer(b"".join(i.to_bytes(4, "little") for i in (0, 1, 2, 2, 3)))
    valid = pa.py_buffer(bytes([0b1011]))
    buffers = [valid, offsets, pa.py_buffer(b"a\xffc")]
    broken = pa.Array.from_buffers(pa.string(), 4, buffers)
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    rows = read(Source(path=str(tmp_path / "a.parquet")))
    assert [r.text for r in rows if isinstance(r, Row)] == ["a", "c"]
    assert [(r.number, r.reason) for r in rows if isinstance(r, Bad)] == [
        (2, "invalid UTF-8 in 'text'"),
        (3, "'text' is null, not text"),
    ]


@pytest.mark.parametrize("format_", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize("packer", [".gz", ".zst"])
@pytest.mark.parametrize("lost", [1, 3, 200])
def test_a_cut_archive_is_named(tmp_path, format_, packer, lost):
    path = tmp_path / f"a.{format_}{packer}"
    texts = [f"{i * 7919 % 1000}" * 9 for i in range(500)]
    path.write_bytes(PACKERS[packer](WRITERS[format_](texts))[:-lost])
    with pytest.raises(
        UserError, match=rf"a\.{format_}\{packer} is truncated or damaged.*replace this"
    ):
        read(Source(path=str(path)))


@pytest.mark.parametrize("lost", [1, 50, 10**4])
def test_a_cut_parquet_is_named(tmp_path, lost):
    path = tmp_path / "a.parquet"
    path.write_bytes(write_parquet([f"{i}" for i in range(1000)])[:-lost])
    with pytest.raises(UserError, match=r"a\.parquet is truncated or damaged"):
        read(Source(path=str(path)))
    with pytest.raises(UserError, match=r"a\.parquet is not a complete parquet file"):
        read(Source(path=str(path)), part_bytes=100)


def test_wrong_columns_are_named(tmp_path):
    for name, raw in (
        ("a.csv", write_csv(TEXTS)),
        ("a.tsv", WRITERS["tsv"](TEXTS)),
        ("a.parquet", write_parquet(TEXTS)),
    ):
        (tmp_path / name).write_bytes(raw)
        for wrong in ({"text_column": "body"}, {"id_column": "body"}, {"meta_columns": ("body",)}):
            with pytest.raises(UserError, match=r"no column 'body', only 'n', 'text'.*_column"):
                read(Source(path=str(tmp_path / name), **wrong))
    with pytest.raises(UserError, match="column 'n' is int64, not text"):
        read(Source(path=str(tmp_path / "a.parquet"), text_column="n"))


def test_a_wrong_column_of_jsonl_is_found_early(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "LOOK_ROWS", 5)
    (tmp_path / "a.jsonl").write_bytes(WRITERS["jsonl"](TEXTS))
    with pytest.raises(UserError, match="none of the first 5 rows has 'body'; no 'body', only 'n'"):
        read(Source(path=str(tmp_path / "a.jsonl"), text_column="body"))


@pytest.mark.parametrize(
    "path, options, message",
    [
        ("missing.txt", {}, "does not exist"),
        ("*.nothing", {}, "matches no file"),
        ("empty", {}, "matches no file"),
        ("a.pdf", {}, r"unknown format \(.pdf\); supported are .txt"),
        ("a.json", {}, "format = 'jsonl'"),
        ("pdfs", {}, "holds only files of an unknown format"),
        ("pdfs", {"format": "csv"}, "holds no csv file, only .pdf"),
        ("nope://x/a.txt", {}, "nope"),
    ],
)
def test_what_cannot_be_found(tmp_path, path, options, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pdfs").mkdir()
    for name in ("a.pdf", "a.json", "pdfs/b.pdf"):
        (tmp_path / name).write_text("x")
    where = path if "://" in path else str(tmp_path / path)
    with pytest.raises(UserError, match=message):
        read(Source(path=where, **options))
