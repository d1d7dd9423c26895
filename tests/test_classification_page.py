"""The pages on classification and regression: their run files and commands, as printed, on a small
encoder."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest

from lmwright.cli.main import main
from lmwright.models.eurobert import EuroBert
from tests.page_folder import write_encoder, write_run_file

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "classification.md"
# The pages start from a model of the hub; their lines stay as they are but for these words behind.
SHORTER = (
    "train.init_from=encoder", "train.global_batch_size=8", "train.precision=fp32",
    "optim.learning_rate=3e-3", "data.pack.seq_len=32", "data.workers=1", "metrics.trackers=[]",
    "train.epochs=30",
)  # fmt: skip


def write_reviews(path, words, count=200):
    """Reviews whose class a word of theirs decides."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["review", "sentiment"])
        for i in range(count):
            label = words[i % 2]
            writer.writerow(
                [f"film {i} is {label} and {i % 7} hours long", ("negative", "positive")[i % 2]]
            )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an encoder, reviews and run.toml."""
    monkeypatch.chdir(tmp_path)
    write_reviews(tmp_path / "reviews.csv", ("bad", "fine"))
    write_reviews(tmp_path / "new.csv", ("bad", "fine"), 30)
    model = EuroBert(
        vocab_size=300, embed_dim=16, mlp_dim=24, num_layers=1, num_heads=2, num_kv_heads=2,
        head_dim=8, seq_len=64,
    )  # fmt: skip
    write_encoder(model, 32, path="reviews.csv", text_column="review")
    write_run_file(PAGE)
    return tmp_path


@pytest.mark.slow
def test_the_page_runs_as_printed(folder, capsys):
    lines = re.findall(r"^    (lmwright .+)$", PAGE.read_text("utf-8"), re.M)
    verbs = []
    for line in lines[:5]:
        _, *words = shlex.split(line)
        verbs.append(words[0])
        assert main([*words, *(SHORTER if "run.toml" in words else ())]) == 0
    assert verbs == ["prepare", "train", "eval", "predict", "export"]
    said = capsys.readouterr().out
    assert "fresh ones for classifier" in said and "class of reviews" in said
    found = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    right = sum(line["label"] == ("negative", "positive")[i % 2] for i, line in enumerate(found))
    assert len(found) == 30 and right >= 27
    capsys.readouterr()
    for line in lines[5:7]:
        _, *words = shlex.split(line)
        verbs.append(words[:2])
        assert main([*words, *(SHORTER if "run.toml" in words else ())]) == 0
    assert verbs[5:] == [["train", "run.toml"], ["adapters", "export"]]
    assert "fresh ones for classifier" in capsys.readouterr().out
    config = json.loads((folder / "my-adapter/adapter_config.json").read_text())
    assert config["modules_to_save"] == ["classifier", "dense"]
    assert main(["adapters", "merge", "encoder", "my-adapter", "merged"]) == 0
    shown = []
    for model in ("merged", "runs/reviews-lora"):
        said = ["--text-column", "review", "--precision", "fp32"]
        assert main(["predict", model, "new.csv", *said]) == 0
        shown.append([json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()
                      if line.startswith("{")])  # fmt: skip
    right = sum(label == ("negative", "positive")[i % 2] for i, label in enumerate(shown[0]))
    assert shown[0] == shown[1] and right >= 27


def write_pairs(path, count=200):
    """Queries and passages, whose number a word of the query decides."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "passage", "relevance"])
        for i in range(count):
            query = f"where is the {('river', 'garden')[i % 2]}"
            writer.writerow([query, f"it is {i % 7} miles away", i % 2 - 0.25])


@pytest.mark.slow
def test_the_page_on_numbers_runs_as_printed(folder, capsys):
    page = (DOCS / "regression.md").read_text("utf-8")
    write_pairs(folder / "pairs.csv")
    write_pairs(folder / "new.csv", 40)
    (folder / "run.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.S)[1])
    verbs = []
    for line in re.findall(r"^    (lmwright .+)$", page, re.M):
        _, *words = shlex.split(line)
        verbs.append(words[0])
        assert main([*words, *(SHORTER if "run.toml" in words else ())]) == 0
    assert verbs == ["prepare", "train", "eval", "predict", "export"]
    said = capsys.readouterr().out
    assert re.search(r"numbers of mean \S+ and standard deviation", said) and "Spearman" in said
    found = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    scores = [line["score"] for line in found]
    assert len(scores) == 40 and max(scores[::2]) < 0.2 < min(scores[1::2])
