"""Notebooks for Kaggle and Colab: valid, and their cells train."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from lmwright.cli.main import main
from lmwright.cloud.kaggle.notebook import write_notebook
from lmwright.cloud.kaggle.session import newest_step, unpack
from lmwright.cloud.spec import Limits
from lmwright.config.load import dump_toml
from lmwright.errors import UserError
from tests.cloud.kaggle.host_packages import use_packages_of_this_python


def code_of(file, **changes):
    """The code of all cells, one after the other."""
    cells = json.loads(file.read_text())["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    for before, after in changes.values():
        assert before in text
        text = text.replace(before, after)
    return text


def test_it_is_a_notebook(run, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    (data,) = write_notebook(run, "cats", Limits(), tmp_path / "cats.ipynb")
    notebook = nbformat.read(tmp_path / "cats.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert data.parent == tmp_path and data.name in notebook.cells[0].source
    compile(code_of(tmp_path / "cats.ipynb"), "notebook", "exec")


def test_bad_files(run, tmp_path):
    with pytest.raises(UserError, match=r"has to end in .ipynb"):
        write_notebook(run, "cats", Limits(), tmp_path / "cats.py")
    with pytest.raises(UserError, match=r"is not a folder"):
        write_notebook(run, "cats", Limits(), tmp_path / "no" / "cats.ipynb")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dry-run"], "--dry-run: has no effect"),
        (["--detach"], "--detach: has no effect"),
        (["--spot"], "--spot, --on-demand"),
        (["--on", "v4-8"], "--on: has no effect"),
    ],
)
def test_options_without_effect_are_refused(run, tmp_path, capsys, words, told):
    """A dry run does nothing, and so writes no files."""
    (tmp_path / "run.toml").write_text(dump_toml(run))
    file = tmp_path / "cats.ipynb"
    assert main(["launch", str(tmp_path / "run.toml"), "--notebook", str(file), *words]) == 2
    assert told in capsys.readouterr().err and not file.exists()
    assert not [*tmp_path.glob("*.lmw")]


@pytest.mark.slow
def test_its_cells_train_and_go_on(run, tmp_path, monkeypatch):
    wheel = use_packages_of_this_python(monkeypatch, tmp_path / "wheels")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))  # else it would come from the index
    for steps in (2, 4):
        longer = replace(run, train=replace(run.train, steps=steps))
        write_notebook(longer, "cats", Limits(), tmp_path / "cats.ipynb")
        text = code_of(
            tmp_path / "cats.ipynb",
            chips=("tpu,cpu", "cpu"),
            internet=('"hosts": ["pypi.org"]', '"hosts": []'),
            index=('"no_index": false', '"no_index": true'),
            place=('"work": ""', f'"work": "{tmp_path / str(steps)}"'),
            mount=("/kaggle/input", str(tmp_path)),
        )
        (tmp_path / "cells.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True
        )
        assert "exit code 0" in done.stdout, done.stdout + done.stderr
    unpack(tmp_path / "lmwright-output" / "run-cats-2.lmw", tmp_path / "run")
    assert newest_step(str(tmp_path / "run")) == 4
