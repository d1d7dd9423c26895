"""README's "Your own text", run as printed."""

import gzip
import json
import random
import re
import shlex
from pathlib import Path

import pytest

from lmwright.cli.main import main
from tests.resume.conftest import one_device  # noqa: F401

README = Path(__file__).resolve().parents[1] / "README.md"
# The page trains for hours; the lines stay as they are but for these words at their end.
SHORTER = (
    "train.steps=2", "train.global_batch_size=1", "model.vocab_size=8064", "model.num_layers=1",
)  # fmt: skip


def page():
    """The run file and the command lines of the section."""
    text = README.read_text(encoding="utf-8")
    section = re.search(r"\n## Your own text\n(.*?)(?=\n## |\Z)", text, re.S)[1]
    run_file = re.search(r"```toml\n# my\.toml\n(.*?)```", section, re.S)[1]
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^    (.+)$", section, re.M)]
    return run_file, [line for line in lines if line[:1] == ["lmwright"]]


def write_texts(folder, documents):
    """A corpus of a few made-up words, as the run file's sources name it."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(3000)]
    path = folder / "texts" / "deep" / "part.jsonl.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as out:
        for _ in range(documents):
            text = " ".join(draw.choices(words, k=27_000 // documents))
            out.write(json.dumps({"text": text}) + "\n")


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("documents", [1, pytest.param(18, marks=pytest.mark.slow)])
def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys, documents):
    monkeypatch.chdir(tmp_path)
    run_file, lines = page()
    assert [line[1] for line in lines] == "prepare train eval generate export".split()
    Path("my.toml").write_text(run_file)
    write_texts(tmp_path, documents)
    for line in lines:
        words = line[1:] + list(SHORTER if line[1] == "train" else ())
        code = main(words)
        said = capsys.readouterr()
        print(said.out, said.err)
        assert code == 0, (line, said.err)
        if line[1] == "eval":
            assert re.search(r"^texts?\S* +[\d,]+ +\d+\.\d{4}", said.out, re.M), said.out
    assert Path("out", "model.safetensors").exists() and Path("out", "tokenizer.json").exists()
