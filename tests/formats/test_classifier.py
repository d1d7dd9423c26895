"""A classifier from a run to transformers, to `predict`, and to the runs that start from it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.param import walk
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.evals import documents, predict
from lmwright.formats.convert import export_command
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run
from lmwright.models.classifier import Classifier
from lmwright.models.eurobert import EuroBert
from lmwright.models.modernbert import ModernBert
from lmwright.objectives.classify import Classify
from lmwright.objectives.mlm import Mlm
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.trainee import Frozen
from lmwright.train.start import first_state, starting_note
from tests.labeled_run import LABELS, SIZES, TEXTS, labeled_run
from tests.saved_run import save_run, weights_at

EXACT = {"precision": "fp32"}  # machines that multiply bf16 in hardware use that


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with random weights."""
    root = tmp_path_factory.mktemp("classes")
    run = labeled_run(root, EuroBert(mlp_dim=24, **SIZES), pooling="mean")
    save_run(run, steps=(1,))
    return run


@pytest.fixture(scope="module")
def modern(run):
    """The same of a ModernBERT, whose pooling is its own."""
    model = ModernBert(mlp_dim=20, window=9, **SIZES | {"num_kv_heads": 4})
    run = replace(run, dir=f"{run.dir}-modern", model=model, objective=Classify(labels=LABELS))
    save_run(run, steps=(1,))
    return run


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "model"
    return out, export_command(run.dir, out)


@pytest.fixture(scope="module")
def exported_modern(modern, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "modern"
    return out, export_command(modern.dir, out)


@pytest.fixture
def both(request):
    """(run, export) of a fixture's name."""
    name = request.param
    ends = {"run": "exported", "modern": "exported_modern"}
    return request.getfixturevalue(name), request.getfixturevalue(ends[name])


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("both", ["run", "modern"], indirect=True)
def test_the_export_opens_in_transformers(both):
    """Scores of the pipeline, of texts that it cuts too, equal those of `predict`."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    run, (out, proof) = both
    there = proof.folder_to_transformers
    assert there.max_abs_diff <= 1e-5 * there.max_abs_logit
    assert proof.source_to_folder.max_abs_diff == 0
    pipe = transformers.pipeline("text-classification", model=str(out), device="cpu")
    theirs = pipe(TEXTS, truncation=True, top_k=None, batch_size=7)
    assert {s["label"] for s in theirs[0]} == set(LABELS)
    file = out.parent / "texts.csv"
    file.write_text("words\n" + "".join(text + "\n" for text in TEXTS))
    for model, devices in ((run.dir, 1), (out, 3)):  # which have texts of their own
        to = out.parent / f"{model == out}.jsonl"
        said = {"out": str(to), "text_column": "words", "devices": devices, **EXACT}
        assert predict.predict_command(str(model), str(file), **said) == 0
        ours = read(to)
        assert [line["row"] for line in ours] == list(range(2, 62))
        for line, scores in zip(ours, theirs, strict=True):
            assert line["label"] == max(scores, key=lambda s: s["score"])["label"]
            for score in scores:
                assert line["scores"][score["label"]] == pytest.approx(score["score"], abs=1e-5)
        assert 0 < sum("cut" in line for line in ours) < 60
    card = (out / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and 'pipeline("text-classification"' in card


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_of_texts_are_as_in_transformers(exported, tmp_path, side):
    """Joined and cut alike, at the side that the folder names; some rows have no second text."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    out = Path(shutil.copytree(exported[0], tmp_path / "model"))
    settings = out / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"truncation_side": side}))
    pipe = transformers.pipeline("text-classification", model=str(out), device="cpu")
    pairs = [(a, b) for a, b in zip(TEXTS, TEXTS[7:], strict=False)]
    pairs[3] = (TEXTS[3], "")
    asked = [{"text": a, "text_pair": b} if b else {"text": a} for a, b in pairs]
    theirs = [pipe(each, truncation=True, top_k=None) for each in asked]
    file, to = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps({"text": a, "other": b}) + "\n" for a, b in pairs))
    predict.predict_command(str(out), str(file), out=str(to), pair_column="other", **EXACT)
    ours = read(to)
    for line, scores in zip(ours, theirs, strict=True):
        for score in scores:
            assert line["scores"][score["label"]] == pytest.approx(score["score"], abs=1e-5)
    assert 5 < sum("cut" in line for line in ours) < len(pairs) - 5


def test_second_texts_that_are_no_text_have_an_error(run, tmp_path):
    """As in training, where such rows are bad; those without one are read alone."""
    file, out = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    seconds = (TEXTS[1], None, "", 5, 0, False, ["a"], {"b": "c"})
    file.write_text("".join(json.dumps({"text": TEXTS[0], "other": s}) + "\n" for s in seconds))
    predict.predict_command(run.dir, str(file), out=str(out), pair_column="other", **EXACT)
    pair, alone, empty, *bad = read(out)
    assert alone["scores"] == empty["scores"] != pair["scores"]
    kinds = ("a number", "a number", "true or false", "a list", "an object")
    assert [line["error"] for line in bad] == [f"'other' is {kind}, not text" for kind in kinds]


def test_an_interrupted_prediction_goes_on(run, tmp_path, monkeypatch, capsys):
    """Without a line lost or twice, after a line that was cut off; other wishes begin anew."""
    file, out = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    rows = [json.dumps({"text": t}) for t in TEXTS]
    rows[7] = json.dumps({"text": 3})
    rows[40] = json.dumps({"text": " "})
    file.write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(documents, "CHUNK", 16)
    whole = predict.predict_lines

    def broken(*args):
        for number, lines in enumerate(whole(*args)):
            if number == 2:
                yield ['{"row": 33, "la']
                raise KeyboardInterrupt
            yield lines

    monkeypatch.setattr(predict, "predict_lines", broken)
    with pytest.raises(KeyboardInterrupt):
        predict.predict_command(run.dir, str(file), out=str(out))
    assert not out.exists()
    monkeypatch.setattr(predict, "predict_lines", whole)
    predict.predict_command(run.dir, str(file), out=str(out))
    said = capsys.readouterr().out
    assert "32 rows were there; 58 texts: " in said and "2 rows without a text" in said
    found = read(out)
    assert [line["row"] for line in found] == list(range(1, 61))
    assert found[7]["error"] == "'text' is a number, not text"
    assert found[40] == {"row": 41, "id": "texts.jsonl:41", "error": "its text is empty"}
    assert not list(tmp_path.glob("*.part*"))
    with pytest.raises(UserError, match="exists; replace it with --overwrite"):
        predict.predict_command(run.dir, str(file), out=str(out))


def test_known_classes_are_compared(run, tmp_path, capsys):
    """Accuracy, loss and the least likely texts, from the lines as they are written."""
    file, out = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    file.write_text(
        "".join(json.dumps({"text": t, "y": i % 3}) + "\n" for i, t in enumerate(TEXTS))
    )
    ask = {"out": str(out), "label_column": "y", **EXACT}
    predict.predict_command(run.dir, str(file), **ask)
    said, found = capsys.readouterr().out, read(out)
    assert [line["expected"] for line in found] == [LABELS[i % 3] for i in range(60)]
    right = sum(line["expected"] == line["label"] for line in found)
    scores = [line["scores"][line["expected"]] for line in found]
    row = re.search(r"^texts.jsonl +60 +(\S+) +(\S+)%", said, re.M)
    assert float(row[1]) == pytest.approx(-np.mean(np.log(scores)), abs=1e-4)
    assert float(row[2]) == pytest.approx(100 * right / 60, abs=0.06)
    worst = found[int(np.argmin(scores))]
    assert re.search(r"least likely: (\S+),", said)[1] == worst["id"]
    assert said.count("least likely") == 5
    file.write_text(json.dumps({"text": "a", "y": "cow"}) + "\n")
    with pytest.raises(UserError, match=r"texts.jsonl:1: y 'cow' is not one of the model's"):
        predict.predict_command(run.dir, str(file), **ask, overwrite=True)


def test_what_predict_refuses(run, tmp_path, capsys):
    (tmp_path / "a.csv").write_text("words\nhello\n")
    assert main(["predict", run.dir, str(tmp_path / "a.csv")]) == 2
    assert "has no column 'text', only 'words'; change --text-column" in capsys.readouterr().err
    assert main(["predict", run.dir, str(tmp_path / "none.csv")]) == 2
    (tmp_path / "a.txt").write_text("hello\n")
    assert main(["predict", run.dir, str(tmp_path / "a.txt"), "--label-column", "label"]) == 2
    assert "--label-column: no effect on" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text('{"text": " ", "key": "k2"}\n{"text": "hello", "key": 3}\n')
    assert main(["predict", run.dir, str(tmp_path / "a.jsonl"), "--id-column", "key"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["id"] == "k2"
    masked = replace(run, dir=str(tmp_path / "mlm"), objective=Mlm(mask_token_id=1))
    save_run(masked, steps=(1,))
    assert main(["predict", masked.dir, str(tmp_path / "a.csv")]) == 2
    assert "is not a classifier; train one" in capsys.readouterr().err
    assert main(["generate", run.dir, "--prompt", "a"]) == 2
    assert "'eurobert' is an encoder" in capsys.readouterr().err
    assert main(["export", run.dir, str(tmp_path / "a.gguf")]) == 2
    assert main(["vocab", run.dir, str(tmp_path / "v"), "--size", "400"]) == 2


def started(run, origin, tmp_path):
    """Weights by path of a run that starts from a place, fresh ones, and the note on it."""
    (tmp_path / "run").mkdir(exist_ok=True)
    run = replace(run, dir=str(tmp_path / "run"), train=replace(run.train, init_from=str(origin)))
    plan = resolve(run, jax.devices()[:1])
    state = first_state(plan, TokenStore.open(run.data.dir), Frozen({}))
    fresh = init_state(plan)["trained"]["model"]["weights"]
    found = state["trained"]["model"]["weights"]
    return dict(walk(found)), dict(walk(fresh)), starting_note(tmp_path / "run")


def same(a, b, names):
    return all(np.array_equal(a[name], b[name]) for name in names)


@pytest.mark.parametrize("form", ["run", "folder"])
@pytest.mark.parametrize("both", ["run", "modern"], indirect=True)
def test_an_encoder_is_the_start_and_the_scores_are_fresh(both, tmp_path, form):
    """ModernBERT goes on with its head as it was pretrained, without its logits."""
    run, _ = both
    masked = replace(run, dir=str(tmp_path / "mlm"), objective=Mlm(mask_token_id=1))
    origin = save_run(masked, steps=(1,))
    theirs = dict(walk(weights_at(1, masked.model.spec())))
    if form == "folder":
        export_command(origin, tmp_path / "hf")
        origin = tmp_path / "hf"
    found, fresh, note = started(run, origin, tmp_path)
    head = {name for name in found if name.startswith("classifier.")}
    modern = run.model.kind == "modernbert"
    assert len(head) == (2 if modern else 4) and same(found, fresh, head)
    assert same(found, theirs, set(found) - head)
    assert set(theirs) - set(found) == {"decoder_bias" if modern else "head"}
    assert not modern or {"dense", "head_norm"} < set(found)
    assert note == f"weights of {origin}; fresh ones for classifier"


@pytest.mark.parametrize("form", ["run", "folder"])
def test_a_classifier_goes_on_with_its_head_for_its_own_classes(run, exported, tmp_path, form):
    origin = run.dir if form == "run" else exported[0]
    theirs = dict(walk(weights_at(1, run.objective.spec(run.model))))
    found, _, note = started(run, origin, tmp_path)
    assert same(found, theirs, theirs) and note == ""
    other = replace(run, objective=Classify(labels=("x", "y", "z")))
    found, fresh, note = started(other, origin, tmp_path)
    head = [name for name in found if name.startswith("classifier.")]
    assert same(found, fresh, head) and same(found, theirs, set(found) - set(head))
    assert "fresh ones for classifier" in note


def test_a_run_file_takes_the_encoder_of_an_exported_classifier(run, exported, tmp_path):
    (tmp_path / "run.toml").write_text(
        f"""
        name = "more"
        dir = "run"
        objective = {{kind = "classify", labels = ["x", "y"]}}
        optim = {{kind = "adamw", learning_rate = 1e-3}}
        data = {{dir = "data"}}
        train = {{steps = 1, global_batch_size = 2, init_from = "{exported[0]}"}}
        """
    )
    assert load_run(tmp_path / "run.toml").model == run.model
    again = load_model(exported[0]).model
    assert again == Classifier(run.model, LABELS, "mean")
