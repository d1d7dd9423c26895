"""The text of the quickstart, made by a command that was killed before."""

from pathlib import Path

from lmwright.cli import quickstart


def test_quickstart_removes_what_a_killed_one_left(tmp_path, monkeypatch):
    (tmp_path / ".code.jsonl.4711.tmp").write_text("half of it")
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr(quickstart, "modules", lambda: [("a.py", Path(__file__).read_text())])
    quickstart.write_corpus(tmp_path)
    names = [path.name for path in tmp_path.iterdir()]
    assert "notes.txt" in names and any(name.startswith("code") for name in names)
    assert not any(name.startswith(".") for name in names)
