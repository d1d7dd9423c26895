"""The page on questions: its run file and commands, as printed, on a small encoder."""

import json
import re
import shlex
from pathlib import Path

import pytest

from lmwright.cli.main import main
from lmwright.models.modernbert import ModernBert
from tests.page_folder import write_encoder, write_run_file

PAGE = Path(__file__).resolve().parents[1] / "docs" / "questions.md"
# The page starts from a model of the hub; its lines stay as they are but for these words behind.
SHORTER = (
    "train.init_from=encoder", "train.global_batch_size=8", "train.precision=fp32",
    "optim.learning_rate=3e-3", "data.pack.seq_len=48", "objective.window_tokens=48",
    "objective.window_overlap=8", "data.workers=1", "metrics.trackers=[]", "train.epochs=30",
)  # fmt: skip
PEOPLE, PLACES = ("Ada Lovelace", "Alan Turing", "Grace Hopper"), ("London", "New York")


def question(i):
    """A row that asks for the person or the place of a sentence; every seventh asks for none."""
    person, place = PEOPLE[i % 3], PLACES[i // 3 % 2]
    context = f"day {i}: {person} saw {place}"
    if i % 7 == 6:
        return {"question": "How much?", "context": context, "answers": []}
    asked, text = (("Who?", person), ("Where?", place))[i // 6 % 2]
    answers = {"text": [text], "answer_start": [context.index(text)]}
    return {"question": asked, "context": context, "answers": answers}


def write_rows(path, numbers):
    path.write_text("".join(json.dumps(question(i)) + "\n" for i in numbers))


@pytest.mark.slow
def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", range(200))
    write_rows(tmp_path / "test.jsonl", range(200, 242))
    write_rows(tmp_path / "new.jsonl", range(42))
    model = ModernBert(
        vocab_size=300, embed_dim=32, mlp_dim=48, num_layers=2, num_heads=4, num_kv_heads=4,
        head_dim=8, seq_len=64,
    )  # fmt: skip
    write_encoder(model, 48, path="new.jsonl", text_column="context")
    write_run_file(PAGE)
    verbs = []
    for line in re.findall(r"^    (lmwright .+)$", PAGE.read_text("utf-8"), re.M):
        _, *words = shlex.split(line)
        verbs.append(words[0])
        assert main([*words, *(SHORTER if "run.toml" in words else ())]) == 0
    assert verbs == ["prepare", "train", "eval", "predict", "export"]
    assert "exact match" in capsys.readouterr().out
    assert main(["report", "runs/answers"]) == 0
    text = Path("runs/answers/metrics.jsonl").read_text()
    held = [json.loads(line) for line in text.splitlines()]
    f1 = [line["answer_f1"] for line in held if line["kind"] == "eval"][-1]
    assert f1 > 0.9
    page = Path("runs/answers/report.html").read_text("utf-8")
    assert "answer f1, test" in page and f"F1 {100 * f1:.1f}" in page
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    wanted = [(question(i)["answers"] or {"text": [""]})["text"][0] for i in range(42)]
    right = sum(line["answer"] == text for line, text in zip(found, wanted, strict=True))
    assert len(found) == 42 and right >= 38
    shown = json.loads(re.search(r'\{"row".*\}', PAGE.read_text("utf-8"))[0])
    assert set(shown) == set(found[0])
    assert set(shown["others"][0]) == set(found[0]["others"][0])
    assert (shown["row"], shown["id"]) == (found[0]["row"], found[0]["id"])
