"""Texts with any number of labels: from rows to a run, to transformers, to `predict` and `eval`."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.config.rows import AnyOf
from lmwright.data.prepare import prepare
from lmwright.data.rows.show import show_command
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.label_sets import LabelSets, SetColumn
from lmwright.errors import UserError
from lmwright.evals.held_out import open_held_out
from lmwright.evals.loss import batch_of
from lmwright.evals.predict import predict_command
from lmwright.formats.convert import export_command
from lmwright.formats.load import load_model
from lmwright.models.eurobert import EuroBert
from lmwright.objectives.classify import Classify
from lmwright.objectives.multilabel import Multilabel, label_bits
from lmwright.program.plan import resolve
from lmwright.program.stores import open_stores
from tests.labeled_run import SEQ_LEN, SIZES, TEXTS, prepared_run
from tests.saved_run import save_run

metrics = pytest.importorskip("sklearn.metrics")

LABELS = ("animal", "long", *(f"part {i}" for i in range(18)), "late")  # of more than one token
ROWS = [
    {
        "text": text,
        "label": [
            *(["animal"] if "cow" not in text else []),
            *([1] if len(text) > 80 else []),
            f"part {i % 18}",
            *(["late"] if i % 4 > 1 else []),
        ]
        if i % 5
        else [],
    }
    for i, text in enumerate(TEXTS)
]
EXACT = {"precision": "fp32", "overwrite": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with random weights."""
    root = tmp_path_factory.mktemp("sets")
    run = prepared_run(
        root, EuroBert(mlp_dim=24, **SIZES), Multilabel(labels=LABELS), ROWS, rows="labeled"
    )
    save_run(run, steps=(1,), std=0.3)
    return run


@pytest.fixture(scope="module")
def exported(run):
    out = f"{run.dir}-exported"
    proof = export_command(run.dir, out)
    there = proof.folder_to_transformers
    assert there is None or there.max_abs_diff <= 1e-5 * max(1, there.max_abs_logit)
    return out


def names_of(row):
    """The labels of a row by name, in the order of the run's."""
    found = {LABELS[each] if isinstance(each, int) else each for each in row["label"]}
    return [label for label in LABELS if label in found]


def hot(lists):
    return np.array([[label in names for label in LABELS] for names in lists])


def test_rows_keep_the_labels_of_each_text(run, capsys):
    """Of more classes than stand beside one token; texts without any are there, too."""
    store = TokenStore.open(run.data.dir)
    assert store.holds == "texts with any number of labels" and not store.tagged
    found = []
    for rows in store.eval_batches("held", 1):
        bits = np.asarray(label_bits(batch_of(rows), len(LABELS)))[0]
        found += list(bits[: rows["segment_ids"].max()])
    wanted = hot(map(names_of, ROWS[-10:]))
    np.testing.assert_array_equal(sorted(map(tuple, found)), sorted(map(tuple, wanted)))
    assert not wanted.any(1).all()
    show_command(run.data.dir, 0, 50)
    said = capsys.readouterr().out
    assert "tokens, animal, part 1: 'the dog 1" in said and "tokens, no label: " in said


def test_the_export_is_a_multi_label_pipeline(run, exported, tmp_path):
    """Its scores are those of predict, from the run and from the export."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    pipe = transformers.pipeline("text-classification", model=exported, device="cpu", top_k=None)
    assert pipe.model.config.problem_type == "multi_label_classification"
    wanted = [
        {each["label"]: each["score"] for each in found} for found in pipe(TEXTS, truncation=True)
    ]
    assert load_model(exported).model.per_text == "any"
    for model in (run.dir, exported):
        for line, theirs in zip(predicted(model, tmp_path), wanted, strict=True):
            assert [*line["scores"]] == [*LABELS]
            for label, score in line["scores"].items():
                assert score == pytest.approx(theirs[label], abs=1e-5)
            assert line["labels"] == [c for c in LABELS if line["scores"][c] > 0.5]
    assert "truncation=True, top_k=None" in (load_model(exported).path / "README.md").read_text()


def predicted(model, tmp_path, **said):
    """Lines of `predict` of all rows, whose labels are JSON in a csv."""
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows = [r | {"label": json.dumps(r["label"])} if i % 2 else r for i, r in enumerate(ROWS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    predict_command(str(model), str(file), out=str(out), **EXACT, **said)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_known_labels_are_compared(exported, tmp_path, capsys):
    """As scikit-learn counts them, at another threshold."""
    lines = predicted(exported, tmp_path, label_column="label", threshold=0.4)
    said = capsys.readouterr().out
    assert [line["expected"] for line in lines] == [*map(names_of, ROWS)]
    real, given = (hot(line[name] for line in lines) for name in ("expected", "labels"))
    micro, macro = (
        metrics.f1_score(real, given, average=a, zero_division=0) for a in ("micro", "macro")
    )
    source = next(line for line in said.splitlines() if line.startswith("rows.jsonl "))
    right = metrics.accuracy_score(real, given)
    assert source.split()[-3:] == [f"{right:.1%}", f"{micro:.4f}", f"{macro:.4f}"]
    late = next(line for line in said.splitlines() if line.startswith("late ")).split()
    each = metrics.precision_recall_fscore_support(real[:, -1], given[:, -1], average="binary")
    assert late[1:] == [f"{real[:, -1].sum()}", f"{given[:, -1].sum()}",
                        f"{each[0]:.1%}", f"{each[1]:.1%}", f"{each[2]:.4f}"]  # fmt: skip
    assert said.count("least likely: ") == 5
    with pytest.raises(UserError, match=r"rows.jsonl:1: text 'the cat .*' is not one of"):
        predicted(exported, tmp_path, label_column="text")


def test_held_out_scores(run, tmp_path, capsys):
    """Of the texts that predict gives the same labels."""
    opened = open_held_out(run.dir, precision="fp32")
    (loss,) = opened.held_out.losses(opened.weights)
    lines = predicted(run.dir, tmp_path)[-10:]
    real, given = hot(map(names_of, ROWS[-10:])), hot(line["labels"] for line in lines)
    shares = np.array([[*line["scores"].values()] for line in lines])
    nll = -np.log(np.where(real, shares, 1 - shares)).mean()
    assert loss.loss == pytest.approx(nll, rel=1e-4)
    wanted = np.stack([(real & given).sum(0), given.sum(0), real.sum(0)], 1)
    np.testing.assert_array_equal(loss.label_counts, wanted)
    assert loss.accuracy == pytest.approx((real == given).all(1).mean())
    assert main(["eval", run.dir]) == 0
    assert "micro F1" in capsys.readouterr().out


@pytest.mark.parametrize("given, refused", [(["0", "1", "1"], True), (["0", "0"], False)])
def test_a_number_for_each_class_is_no_list_of_classes(given, refused):
    """As transformers has the labels of a text, which would be the classes 0 and 1."""
    column = SetColumn(LabelSets(("red", "small", "round"), 16), "toys")
    if refused:
        with pytest.raises(UserError, match="row 3 has 0 or 1 for each class; give the list"):
            column.add(given, "row 3", 5)
    else:
        assert column.add(given, "row 3", 5).tolist() == [1, 0, 0, 0, 0]


def test_what_is_refused(run, exported, tmp_path, capsys):
    one = replace(run, objective=Classify(labels=LABELS))
    with pytest.raises(UserError, match=r"holds texts with any number .* choose 'multilabel'"):
        open_stores(resolve(one, jax.devices()[:1]))
    data = replace(run.data, dir=str(tmp_path / "data"))
    with pytest.raises(UserError, match=r"texts.jsonl:1 has a list of labels; use .*'multilabel'"):
        prepare(data, SEQ_LEN, labels=LABELS)
    with pytest.raises(UserError, match=r"has the label 'late', which is not one of"):
        prepare(data, SEQ_LEN, labels=AnyOf(("animal", "long", "part 1", "part 2")))
    many = AnyOf((*LABELS, *(f"more {i}" for i in range(400))))
    with pytest.raises(UserError, match=r"tokens, and 421 classes need 27 to be stored"):
        prepare(data, SEQ_LEN, labels=many)
    (tmp_path / "t.txt").write_text("a\n")
    other = replace(run, dir=str(tmp_path / "one"), objective=Classify(labels=("a", "b")))
    save_run(other, steps=(1,))
    assert main(["predict", other.dir, str(tmp_path / "t.txt"), "--threshold", "0.3"]) == 2
    assert "--threshold: 0.3 has no effect on a model that" in capsys.readouterr().err
