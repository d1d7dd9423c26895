"""Labels in run files that `lmwright init` writes: names, classes or amounts."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.cli.main import main
from lmwright.formats.open import load_run
from tests.init_data import NAMES, TAGS, described, make_models, write


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_numbers_that_count_from_zero_are_classes(models, here):
    rows = [{"text": f"a text {number}", "label": number % 11} for number in range(99)]
    words = [write(here / "a.jsonl", *rows), "--model", str(models / "encoder")]
    assert main(["init", "my.toml", *words]) == 0
    run = load_run("my.toml")
    assert run.objective.kind == "classify"
    assert run.objective.labels == tuple(str(number) for number in range(11))
    write(here / "a.jsonl", *[row | {"label": row["label"] + 1} for row in rows])
    assert main(["init", "other.toml", *words]) == 0
    assert load_run("other.toml").objective.kind == "regress"
    assert main(["prepare", "my.toml", "data.dir=other", "data.workers=1"]) == 2  # of other labels


@pytest.mark.parametrize(
    ("column", "values", "objective"),
    [
        ("label", [0.0, 1.0, 2.0], "regress"),
        ("label", [0.0, 1.0], "classify"),
        ("label", [0, 1, 2], "classify"),
        ("score", [0, 1, 2], "regress"),
        ("score", ["low", "high"], "classify"),
    ],
)
def test_decimals_and_scores_are_amounts(column, values, objective, models, here):
    rows = [{"sentence1": f"a {v}", "sentence2": f"b {v}", column: v} for v in values * 3]
    words = ["--model", str(models / "encoder")]
    pq.write_table(pa.Table.from_pylist(rows), here / "a.parquet")
    assert main(["init", "table.toml", "a.parquet", *words]) == 0
    assert main(["init", "my.toml", write(here / "a.jsonl", *rows), *words]) == 0
    for name in ("table.toml", "my.toml"):
        assert load_run(name).objective.kind == objective


def test_classes_in_columns_of_their_own_are_noted(here, capsys):
    """Columns text, joy, anger: the texts alone would be learned, and nobody would know."""
    rows = [f"a text {n},{n % 2},{n // 5 % 2},{n % 3}\n" for n in range(20)]
    (here / "a.csv").write_text("text,joy,anger,year\n" + "".join(rows))
    assert main(["init", "plain.toml", "a.csv"]) == 0
    told = capsys.readouterr().out
    assert "note: its columns joy, anger have only 0 and 1, and are not read;" in told
    assert 'as the list ["joy", "anger"] (docs/multilabel.md)' in told
    flags = [{"text": f"a text {n}", "joy": n % 2 == 0, "sad": n % 3 == 0} for n in range(20)]
    assert main(["init", "other.toml", write(here / "b.jsonl", *flags)]) == 0
    assert "its columns joy, sad have only 0 and 1" in capsys.readouterr().out


def test_a_score_of_texts_alone_is_learned_where_it_is_said(models, here, capsys):
    """It may be the quality of texts to pretrain on, as in FineWeb-Edu."""
    path = here / "a.csv"
    path.write_text("Text,Score\n" + "".join(f"a text {n},{n % 3}\n" for n in range(20)))
    assert main(["init", "plain.toml", str(path)]) == 0
    assert "note: its column Score is not read; for a model that" in capsys.readouterr().out
    assert load_run("plain.toml").data.sources[0].text_column == "Text"
    words = ["--rows", "labeled", "--model", str(models / "encoder")]
    assert main(["init", "my.toml", str(path), *words]) == 0
    run = load_run("my.toml")
    assert run.objective.kind == "regress"
    assert run.data.sources[0].columns == {"text": "Text", "label": "Score"}
    assert main(["prepare", "my.toml", "data.workers=1"]) == 0


@pytest.mark.parametrize(
    ("values", "objective", "labels", "note"),
    [
        ([0, 2], "regress", (), 'if they are classes, write recipe = "finetune-classifier" and'),
        ([0, 2, 1, -1], "classify", ("0", "1", "2"), 'rows with the label "-1" are left out'),
        ([1, -1], "regress", (), 'with labels = ["-1", "1"]'),
        ([0.5, 2.0], "regress", (), 'for vectors whose cosines they are, write recipe = "fine'),
    ],
)
def test_what_numbers_may_be_instead_is_said(values, objective, labels, note, models, here, capsys):
    """SNLI has the label -1 where people did not agree; a file may begin without one of them."""
    rows = [{"premise": f"a {v}", "hypothesis": f"b {v}", "label": v} for v in values * 3]
    words = [write(here / "a.jsonl", *rows), "--model", str(models / "encoder")]
    assert main(["init", "my.toml", *words]) == 0
    run, out = load_run("my.toml"), capsys.readouterr().out
    assert run.objective.kind == objective and getattr(run.objective, "labels", ()) == labels
    assert note in out and "note: " in out


def test_numbers_have_the_names_beside_them(models, here, capsys):
    tagged = {"tokens": ["Ada", "slept"], "ner_tags": [1, 0]}
    labeled = [{"text": f"text {number}", "label": number} for number in (1, 0, -1)]
    pq.write_table(described([tagged], ner_tags=TAGS), here / "tagged.parquet")
    (here / "set").mkdir()
    write(here / "set" / "a.jsonl", *labeled)
    other = {"names": ["PER", "loc"], "_type": "ClassLabel"}
    for names in (NAMES, other):
        info = {"features": {"text": {"_type": "Value"}, "label": names}}
        (here / "set" / "dataset_info.json").write_text(json.dumps(info))
        words = ["--model", str(models / "encoder"), "--overwrite"]
        assert main(["init", "set.toml", "set", *words]) == 0
        assert load_run("set.toml").objective.labels == tuple(names["names"])
    assert main(["init", "my.toml", "tagged.parquet", *words]) == 0
    assert load_run("my.toml").objective.labels == ("O", "B-PER", "B-LOC")
    pq.write_table(described([labeled[0]], label=NAMES), here / "labeled.parquet")
    assert main(["init", "my.toml", "labeled.parquet", "set", *words]) == 2
    assert "number their labels differently" in capsys.readouterr().err
    names = {"names": ["1", "2"], "_type": "ClassLabel"}
    pq.write_table(described(labeled[:2], label=names), here / "labeled.parquet")
    assert main(["init", "my.toml", "labeled.parquet", *words]) == 0
    assert load_run("my.toml").objective.labels == ("0", "1")


def test_the_form_of_snlis_own_files(models, here, capsys):
    told = ("neutral", "-", "entailment", "contradiction")
    rows = [
        {"annotator_labels": [], "gold_label": label, "pairID": label, "sentence1": f"a {label}",
         "sentence1_parse": "(ROOT)", "sentence2": f"b {label}"}
        for label in told * 3
    ]  # fmt: skip
    words = [write(here / "a.jsonl", *rows), "--model", str(models / "encoder")]
    assert main(["init", "my.toml", *words]) == 0
    run, out = load_run("my.toml"), capsys.readouterr().out
    assert run.objective.labels == ("contradiction", "entailment", "neutral")
    (source,) = run.data.sources
    assert source.unlabeled == ("-",) and source.columns["label"] == "gold_label"
    assert 'rows with the label "-" are left out' in out
    words = ["data.workers=1", "data.holdout_fraction=0", "data.pack.seq_len=48"]
    assert main(["prepare", "my.toml", *words]) == 0
    assert "a: 3 rows without text or label" in capsys.readouterr().out


@pytest.mark.parametrize("names", [("text", "text_pair"), ("text1", "text2")])
def test_pairs_with_a_score(names, models, here):
    rows = [dict(zip(names, (f"a {n}", f"b {n}"), strict=True), score=n / 7) for n in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), here / "a.parquet")
    assert main(["init", "my.toml", "a.parquet", "--model", str(models / "encoder")]) == 0
    run = load_run("my.toml")
    assert run.objective.kind == "regress" and run.data.sources[0].columns["label"] == "score"
    assert main(["config", "show", "my.toml", "recipe=finetune-similarity"]) == 0


def test_one_label_is_told_before_anything_is_written(models, here, capsys):
    rows = [{"text": f"a text {number}", "label": "x"} for number in range(9)]
    words = [write(here / "a.jsonl", *rows), "--model", str(models / "encoder")]
    assert main(["init", "my.toml", *words]) == 2
    error = capsys.readouterr().err
    assert "a.jsonl: all first rows have the label 'x'" in error and "my.toml" not in error
    words.append(write(here / "b.jsonl", {"text": "another", "label": "y"}))
    assert main(["init", "my.toml", *words]) == 0
    assert load_run("my.toml").objective.labels == ("x", "y")


def test_commands_of_a_name_with_blanks_can_be_pasted(here, capsys):
    assert main(["init", "my run.toml", write(here / "a.jsonl", {"text": "a text"})]) == 0
    told = capsys.readouterr().out
    assert told.count("'my run.toml'") == 4 and "lmwright train 'my run.toml'" in told
