"""Forms of files for which `lmwright init` writes run files, and names of folders."""

import json
import os
import signal
import subprocess
import sys

import pytest

from lmwright.cli import init
from lmwright.cli.main import main
from lmwright.cli.quickstart import write_run_file
from lmwright.data.sources.file import Slice
from lmwright.data.sources.files import find_files
from lmwright.data.sources.read import read_rows
from lmwright.formats.open import load_run
from tests.init_data import make_models


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_models(tmp_path)


def test_one_object_around_its_rows(here):
    """BBH's form."""
    rows = [{"input": f"not {n}?", "target": f"{n}"} for n in range(9)]
    (here / "a.json").write_text(json.dumps({"canary": "x", "ids": [1], "examples": rows}))
    words = ["--model", "decoder", "--overwrite"]
    assert main(["init", "my.toml", "a.json", *words]) == 0
    (source,) = load_run("my.toml").data.sources
    assert (source.format, source.rows, source.columns["prompt"]) == ("json", "prompt", "input")
    assert [r.number for r in read_rows(Slice(find_files(source)[0]), source)] == [*range(1, 10)]
    (here / "a.json").write_text(json.dumps({"examples": rows, "others": rows}))
    assert main(["init", "my.toml", "a.json", *words]) == 2
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (here / "a.json").write_text(json.dumps({"messages": chat}))  # a row, as before
    assert main(["init", "my.toml", "a.json", *words]) == 0
    assert load_run("my.toml").data.sources[0].rows == "messages"


def test_a_csv_file_with_semicolons_is_no_text(here, capsys):
    (here / "a.csv").write_text("text;label\nDas Essen war gut;pos\nNie wieder;neg\n")
    assert main(["init", "my.toml", "a.csv", "--model", "decoder"]) == 2
    assert "a.csv: its cells are parted by semicolons: save it with" in capsys.readouterr().err
    assert not (here / "my.toml").exists()


@pytest.mark.parametrize(
    "columns, left",
    [
        ("question,choice0,choice1,answer", "choice0, choice1;"),
        ("question,answer,system", None),
        ("question,answer,b,c,d,e,f,g,h,i,j,k", "b, c, d, e, f, g, h, i and 2 more;"),
    ],
)
def test_columns_beside_prompts_and_answers_are_told(here, capsys, columns, left):
    (here / "a.csv").write_text(f"{columns}\n{columns}\n")
    assert main(["init", "my.toml", "a.csv", "--model", "decoder"]) == 0
    told = capsys.readouterr().out
    assert (f"note: not read, of its columns: {left}" in told) if left else "note" not in told


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_csv_file_without_a_header_is_one_sentence(here, capsys, text):
    (here / "a.csv").write_text(text)
    assert main(["init", "my.toml", "a.csv", "--model", "decoder"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_quickstart_in_a_folder_of_any_name(tmp_path):
    folder = tmp_path / 'a "\\b'
    write_run_file(folder / "run.toml", folder)
    run = load_run(folder / "run.toml")
    assert run.dir == str(folder / "run") and run.data.dir == str(folder / "data")
    assert run.data.sources[0].path == str(folder / "text" / "code.jsonl")


def test_columns_are_named_by_an_example_and_a_cut_line_by_its_place(here, capsys):
    (here / "gold.jsonl").write_text('{"id": 1, "form": ["Ada", "ran"], "gold": ["N", "V"]}\n')
    assert main(["init", "my.toml", "gold.jsonl", "--rows", "tagged"]) == 2
    example = 'such as rows = "tagged" and columns = {tokens = "COLUMN", tags = "COLUMN"}. Read as'
    assert example in capsys.readouterr().err
    (here / "cut.jsonl").write_text('{"text": "a te')
    assert main(["init", "my.toml", "cut.jsonl"]) == 2
    told = "lmwright: error: cut.jsonl:1: invalid JSON: the line ends within it\n"
    assert capsys.readouterr().err == told


def test_a_hidden_file_of_the_user_stays_and_sigterm_leaves_none(here, monkeypatch):
    (here / ".my.toml").write_text("mine")
    (here / "a.txt").write_text("some text\n" * 9)
    assert main(["init", "my.toml", "a.txt", "--model", "decoder"]) == 0
    assert (here / ".my.toml").read_text() == "mine"
    before = {*here.iterdir()}
    monkeypatch.setattr(init, "load_run", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        main(["init", "other.toml", "a.txt", "--model", "decoder"])
    assert {*here.iterdir()} == before


def test_what_a_killed_init_left_goes_with_the_next_one(here):
    (here / "a.txt").write_text("some text\n" * 9)
    before = {*here.iterdir()}
    killed = (
        "import os, signal\nfrom lmwright.cli import init\n"
        "init.load_run = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "init.init_command('my.toml', ['a.txt'])\n"
    )
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -signal.SIGKILL
    assert not (here / "my.toml").exists()
    assert {*here.iterdir()} > before
    assert main(["init", "my.toml", "a.txt"]) == 0
    assert {*here.iterdir()} == {*before, here / "my.toml"}
