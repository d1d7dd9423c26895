"""The commands on a run with `data.portions`, and the refusals of settings that it cannot have."""

import re
from pathlib import Path

import pytest

from lmwright.data.portions import folder_of, local_folders
from lmwright.data.stored import read_stored
from lmwright.errors import UserError
from lmwright.formats.card import _sources
from lmwright.formats.open import load_run
from tests.data.portioned import list_first, write_corpus
from tests.data.user_run import command

PAGE = Path(__file__).parents[2] / "docs" / "portions.md"
RUN_FILE = """\
recipe = "pretrain"
name = "tiny"
dir = "run"
[model]
kind = "llama"
vocab_size = 320
embed_dim = 16
mlp_dim = 24
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 8
seq_len = 16
[data]
dir = "data"
portions = 3
normalize.dedup = "none"
pack.method = "chunk"
tokenizer.path = "CORPUS/tokenizer"
sources = [{ path = "CORPUS/web", sample_tokens = 1600 }]
[train]
steps = 2
global_batch_size = 8
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def run_file(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.replace("CORPUS", str(corpus)))
    return "run.toml"


@pytest.mark.parametrize(
    "override, said",
    [
        ("data.pack.method=best-fit", 'data.pack.method = "best-fit" cannot be counted'),
        ("data.normalize.dedup=exact", 'data.normalize.dedup = "exact" compares all text'),
        ("data.sources.0.rows=alpaca", 'data.sources.0.rows: "alpaca" are never cut'),
        (
            "data.sources.0.sample_tokens=47",
            "sample_tokens: 47 are 2 rows of 16 tokens, fewer than",
        ),
        ("data.portions=1", "data.portions"),
        ('data.sources=[{path="a"}]', "data.sources.0.sample_tokens: missing"),
    ],
)
def test_rows_that_cannot_be_counted_are_refused(run_file, capsys, override, said):
    code, out = command(capsys, "prepare", run_file, override)
    assert code == 2 and said in out and not Path("data").exists()


def test_a_trained_tokenizer_is_refused(run_file, capsys):
    text = Path(run_file).read_text().replace(", sample_tokens = 1600", "")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("tokenizer"))
    Path(run_file).write_text(text)
    code, out = command(capsys, "prepare", run_file)
    assert code == 2 and "data.portions: a tokenizer is trained on all text; set" in out


def test_portions_that_hold_nothing_out_are_made_anew(run_file, capsys):
    _, out = command(capsys, "prepare", run_file, "data.holdout_fraction=1e-9")
    assert "no document of the first portion is, by data.holdout_fraction = 1e-09; raise it" in out
    code, out = command(capsys, "prepare", run_file, "data.holdout_fraction=0.2")
    assert code == 0 and "nothing is held out" not in out


def test_commands_on_a_store_in_portions(run_file, capsys):
    code, out = command(capsys, "prepare", run_file, "--stage", "normalize")
    assert code == 2 and "each takes all stages; leave --stage out" in out
    code, out = command(capsys, "prepare", run_file)
    assert code == 0 and "portion 3 of 3: 34 rows in data/portion-002" in out
    assert "a sample of 1,6" in out and "in data: 3 portions" in out
    parts, of_parts = map(int, re.search(r"from (\d+) of (\d+) parts", out).groups())
    assert parts <= of_parts  # a part that goes on in the next portion is one
    code, out = command(capsys, "data", "show", run_file, "--start", "99", "-n", "1")
    assert code == 0 and "100 rows of 16 tokens an epoch" in out and "row 99: 16 tokens" in out
    list_first(Path("data"), Path("data"), 1)
    code, out = command(capsys, "data", "show", run_file, "--start", "99")
    assert code == 2 and "portion 3 of 3 is not finished; `lmwright prepare run.toml` makes" in out
    rows = _sources("data")
    assert [row["source"] for row in rows] == ["web"] and rows[0]["tokens"] >= 33 * 16
    assert {path.name for path in local_folders("data")} == {folder_of(0)}
    with pytest.raises(UserError, match="1 of 3 portions are finished, and what is stored"):
        read_stored("data")
    list_first(Path("data"), Path("data"), 0)
    code, out = command(capsys, "train", run_file)
    assert code == 2 and "data: no portion is finished; run `lmwright prepare" in out


def test_the_example_of_the_page_is_a_run(run_file):
    example = PAGE.read_text().split("```toml\n")[1].split("```")[0]
    before, after = RUN_FILE.split("[data]\n")[0], RUN_FILE.split("[train]\n")[1]
    Path("page.toml").write_text(f"{before}{example}[train]\n{after}")
    data = load_run("page.toml", []).data
    assert data.portions == 16 and data.sources[0].sample_tokens == 10_000_000_000
