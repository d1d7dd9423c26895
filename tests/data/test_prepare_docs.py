"""The examples of docs/prepare.md and docs/tokenizer.md work as printed."""

import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from lmwright.config.check_data import check_data
from lmwright.config.run import Data

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("prepare.md", "tokenizer.md")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.S)


@pytest.mark.parametrize("page", PAGES)
def test_python(page, tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    for path in DOCS.glob("*.md"):
        shutil.copy(path, tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(page, "python")
    Path("example.py").write_text(code)
    runpy.run_path("example.py", run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES)
def test_toml(page):
    found = blocks(page, "toml")
    assert found
    for text in found:
        data = {"dir": "data"} | tomllib.loads(text)["data"]
        check_data(TypeAdapter(Data).validate_python(data), seq_len=1024)
