"""`eval --tasks --data`: the harness's own tasks, with data from a folder.

The reference is the way that the harness documents: a .yaml that includes the task's own and names
local files (https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/new_task_guide.md).
"""

import json
from pathlib import Path

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.evals import shared_contexts
from lmwright.evals.tasks import UNASKED
from tests.evals.conftest import sentence

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("torch")

SHOTS = 2
OFFICIAL = {
    "arc_easy": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "mmlu_anatomy": "mmlu/default/mmlu_anatomy.yaml",
}
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
HERE = {  # what the reference is told of each task
    "arc_easy": {"test_split": "test", "fewshot_split": "test"},
    "boolq": {"validation_split": "validation", "training_split": "train"},
    "hellaswag": {"test_split": "validation", "fewshot_split": "validation"},
    "mmlu_anatomy": {"test_split": "test", "fewshot_split": "dev"},
}


def rows_of(task, count, rng):
    say = lambda: sentence(rng, 8)  # noqa: E731
    for number in range(count):
        choices = [f"{say()} {place}" for place in "abcd"]
        yield {
            "arc_easy": {
                "question": f"{number} {say()}", "answerKey": "BC"[number % 2],
                "choices": {"text": choices, "label": list("ABCD")},
            },
            "boolq": {
                "passage": f"{number} {say()} {say()}", "question": say(), "label": number % 2,
                "idx": number,
            },
            "hellaswag": {
                "ind": number, "activity_label": "Tap", "ctx_a": f"{number} {say()}",
                "ctx_b": "then she", "endings": choices, "label": str(number % 4),
            },
            "mmlu_anatomy": {"question": f"{number} {say()}", "choices": choices, "answer": 3},
        }[task]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file of questions, split files and a copy of a dataset of the hub; and where each lies."""
    import datasets

    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    copy = folder / "aps" / "super_glue"
    places = {
        "arc_easy": {"test": folder / "arc_easy.jsonl"},
        "boolq": {split: copy / "boolq" / f"{split}.parquet" for split in ("train", "validation")},
        "hellaswag": {"validation": folder / "hellaswag" / "validation.parquet"},
        "mmlu_anatomy": {s: folder / "mmlu_anatomy" / f"{s}.jsonl" for s in ("test", "dev")},
    }
    for task, splits in places.items():
        for split, path in splits.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = list(rows_of(task, 3 if split == "dev" else 8, rng))
            if path.suffix == ".jsonl":
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            else:
                datasets.Dataset.from_list(rows).to_parquet(path)
    files = [f"  - split: {s}\n    path: boolq/{s}.parquet\n" for s in ("train", "validation")]
    head = "---\nconfigs:\n- config_name: boolq\n  data_files:\n"
    (copy / "README.md").write_text(f"{head}{''.join(files)}---\n")
    return folder, places


@pytest.fixture
def four_tasks(monkeypatch):
    """An index of the harness's own descriptions of these tasks, which takes less than that of all:
    the slow tests read it."""
    from lm_eval import tasks

    home = Path(lm_eval.__file__).parent / "tasks"
    folders = [str((home / path).parent) for path in OFFICIAL.values()]
    index = tasks.TaskManager(include_path=folders, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **_: index)


@pytest.fixture(scope="module")
def wanted(folder, theirs, tmp_path_factory):
    """What the harness finds by the way that it documents."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    own = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        for name, nothing in UNASKED.items():
            patch.setattr(evaluator, name, nothing)
        for task, splits in folder[1].items():
            kind = "parquet" if next(iter(splits.values())).suffix == ".parquet" else "json"
            lines = {
                "include": str(Path(lm_eval.__file__).parent / "tasks" / OFFICIAL[task]),
                "task": f"{task}_local", "dataset_path": kind, "dataset_name": None,
                "dataset_kwargs": {"data_files": {s: str(p) for s, p in splits.items()}},
            } | dict.fromkeys(SPLITS) | HERE[task]  # fmt: skip
            text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in lines.items())
            (own / f"{task}.yaml").write_text(text)
        return evaluator.simple_evaluate(
            model=theirs, tasks=[f"{task}_local" for task in OFFICIAL], num_fewshot=SHOTS,
            task_manager=TaskManager(include_path=str(own), include_defaults=False), limit=6,
            bootstrap_iters=0,
        )  # fmt: skip


def test_tasks_of_the_harness_without_the_hub(
    harness_folder, folder, wanted, four_tasks, tmp_path, capsys, monkeypatch
):
    shared, out = [], tmp_path / "out.json"
    found_shared = shared_contexts.shared_of
    monkeypatch.setattr(
        "lmwright.evals.likelihood.shared_of",
        lambda *args: shared.extend(found_shared(*args)) or found_shared(*args),
    )
    words = ["--data", str(folder[0]), "--shots", str(SHOTS), "--precision", "fp32"]
    words += ["--tasks", ",".join(OFFICIAL), "--limit", "6", "--out", str(out)]
    assert main(["eval", str(harness_folder), *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for task in OFFICIAL:
        alone = f"{task}: its examples are other questions" in said
        assert alone == (task in ("arc_easy", "hellaswag"))
    found = json.loads(out.read_text())
    for task in OFFICIAL:
        ours, theirs = found["samples"][task], wanted["samples"][f"{task}_local"]
        assert len(ours) == len(theirs) == 6
        for one, other in zip(ours, theirs, strict=True):
            assert one["prompt_hash"] == other["prompt_hash"]
            for (a,), (b,) in zip(one["resps"], other["resps"], strict=True):
                assert abs(a[0] - b[0]) < 1e-3
        assert found["results"][task]["acc,none"] == wanted["results"][f"{task}_local"]["acc,none"]
    assert any(each.prefix for each in shared)  # the examples of MMLU, which all questions share


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "bad", "says"),
    [
        ("arc_easy", {"answerKey": None}, "arc_easy.jsonl: row 3: answerKey: empty or not there"),
        ("mmlu_anatomy", {"choices": ["a"]}, "test.jsonl: row 3: list object has no element 1"),
        ("hellaswag", {"ctx_b": 7}, "hellaswag.jsonl: row 3: "),
        ("boolq", {}, "has no data of boolq; put its questions into boolq.jsonl, its splits into "
         "boolq/validation.jsonl, or a copy of the dataset into aps/super_glue"),
    ],
)  # fmt: skip
def test_a_row_that_the_task_cannot_ask(task, bad, says, harness_folder, tmp_path, capsys):
    rows = list(rows_of(task, 5, np.random.default_rng(0)))
    if task != "boolq":
        rows[2] |= bad
        rows[2] = {name: value for name, value in rows[2].items() if value is not None}
        path = tmp_path / ("mmlu_anatomy/test.jsonl" if "mmlu" in task else f"{task}.jsonl")
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--tasks", task, "--data", str(tmp_path), "--precision", "fp32"]
    assert main(["eval", str(harness_folder), *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert says in said and "Traceback" not in said
