"""The page on tags: its run file and commands, as printed, on a small encoder."""

import json
import re
import shlex
from pathlib import Path

import pytest

from lmwright.cli.main import main
from lmwright.models.eurobert import EuroBert
from tests.page_folder import write_encoder, write_run_file

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tags.md"
# The page starts from a model of the hub; its lines stay as they are but for these words behind.
SHORTER = (
    "train.init_from=encoder", "train.global_batch_size=8", "train.precision=fp32",
    "optim.learning_rate=3e-3", "data.pack.seq_len=32", "data.workers=1", "metrics.trackers=[]",
    "train.epochs=30",
)  # fmt: skip
PEOPLE, PLACES = ("Ada Lovelace", "Alan Turing", "Grace Hopper"), ("London", "New York")


def sentence(i):
    """(words, tags) of a sentence that names a person and a place."""
    person, place = PEOPLE[i % 3].split(), PLACES[i % 2].split()
    words = ["day", f"{i}:", *person, "saw", *place]
    who, where = ["B-PER", "I-PER"][: len(person)], ["B-LOC", "I-LOC"][: len(place)]
    return words, ["O", "O", *who, "O", *where]


def write_rows(path, numbers):
    rows = (dict(zip(("tokens", "tags"), sentence(i), strict=True)) for i in numbers)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", range(200))
    write_rows(tmp_path / "test.jsonl", range(200, 230))
    (tmp_path / "new.txt").write_text("".join(f"{' '.join(sentence(i)[0])}\n" for i in range(30)))
    model = EuroBert(
        vocab_size=300, embed_dim=16, mlp_dim=24, num_layers=1, num_heads=2, num_kv_heads=2,
        head_dim=8, seq_len=64,
    )  # fmt: skip
    write_encoder(model, 32, path="new.txt")
    write_run_file(PAGE)
    verbs = []
    for line in re.findall(r"^    (lmwright .+)$", PAGE.read_text("utf-8"), re.M):
        _, *words = shlex.split(line)
        verbs.append(words[0])
        assert main([*words, *(SHORTER if "run.toml" in words else ())]) == 0
    assert verbs == ["prepare", "train", "eval", "predict", "export"]
    assert "entity F1" in capsys.readouterr().out
    assert main(["report", "runs/names"]) == 0
    held = [json.loads(line) for line in Path("runs/names/metrics.jsonl").read_text().splitlines()]
    f1 = [line["entity_f1"] for line in held if line["kind"] == "eval"][-1]
    page = Path("runs/names/report.html").read_text("utf-8")
    assert "entity f1, test" in page and f"{f1:.4f}" in page and f"entity F1 {f1:.3f}" in page
    found = [json.loads(line) for line in (tmp_path / "tags.jsonl").read_text().splitlines()]
    right = sum(line["tags"] == sentence(i)[1] for i, line in enumerate(found))
    assert len(found) == 30 and right >= 27
    shown = re.search(r'\{"row".*\}', PAGE.read_text("utf-8"))[0]
    shown = json.loads(shown)
    assert set(shown) == set(found[0])
    assert (shown["row"], shown["id"]) == (found[0]["row"], found[0]["id"])
