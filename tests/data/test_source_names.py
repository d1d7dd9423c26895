"""Which files a source names, and what they are called."""

from pathlib import Path

import fsspec
import pytest

from lmwright.config.run import Source
from lmwright.data.sources.files import find_files, source_names
from lmwright.errors import UserError


@pytest.mark.parametrize("fs", ["file", "memory"])
def test_a_glob_takes_what_is_hidden_only_where_it_says_so(tmp_path, fs):
    names = "a.jsonl", ".b.jsonl", "x/c.jsonl", ".old/d.jsonl", "x/.old/e.jsonl", "x/.new/.f.jsonl"
    root = f"{tmp_path}/.home/now" if fs == "file" else "memory://hidden/.home/now"
    for name in names:
        fsspec.filesystem(fs, auto_mkdir=True).pipe(f"{root}/{name}", b'{"text": "x"}\n')

    def found(pattern):
        return {file.name for file in find_files(Source(path=f"{root}/{pattern}"))}

    assert found("**/*.jsonl") == found("") == {"a.jsonl", "x/c.jsonl"}
    assert found("*.jsonl") == {"a.jsonl"}
    assert found(".*.jsonl") == {".b.jsonl"}
    assert found("**/.old/*.jsonl") == {".old/d.jsonl", "x/.old/e.jsonl"}
    assert found("x/.[no]*/*.jsonl") == {".old/e.jsonl"}
    assert found("x/.new/.*") == {".f.jsonl"}
    if fs == "file":
        assert found("../now/*/*.jsonl") == {"x/c.jsonl"}
    with pytest.raises(UserError, match="matches no file"):
        found("x/*/*.jsonl")


def test_names_with_a_question_mark(tmp_path):
    """Which ends the path of a URL, and not that of a file."""
    folder = tmp_path / "Who?"
    folder.mkdir()
    for name in ("What is it?.txt", "plain.txt", "Why?.jsonl"):
        (folder / name).write_text('{"text": "a"}\n')
    there = {f.name: f.format for f in find_files(Source(path=str(folder)))}
    assert there == {"What is it?.txt": "txt", "plain.txt": "txt", "Why?.jsonl": "jsonl"}
    assert len(find_files(Source(path=str(folder / "plain.txt")))) == 1


def test_names_of_sources():
    paths = ("a/code.jsonl.gz", "text/", "b/*.txt", "hf://datasets/o/set", "gs://bucket/x/y.csv")
    assert source_names([Source(path=p) for p in paths]) == ["code", "text", "b", "set", "y"]
    assert source_names([Source(path=".")]) == [Path.cwd().name]
    with pytest.raises(UserError, match=r"sources\.1 is called 'a'"):
        source_names([Source(path="a.txt"), Source(path="b.txt", name="a")])
    with pytest.raises(UserError, match="cannot be a folder's name"):
        source_names([Source(path="a.txt", name="a/b")])
