"""A run of replaced tokens by the user's commands: prepared, trained, measured, and both models
exported apart, the discriminator's two tables added, as transformers reads them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.compute import Compute
from lmwright.core.param import walk
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run
from lmwright.formats.weights import load_run_weights
from tests.golden import curves
from tests.golden.cases import CASES
from tests.parity.compare import assert_near, make_batch
from tests.saved_run import save_run

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(1).integers(5, 380, (2, 40))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The run file of a run whose data is prepared."""
    folder = tmp_path_factory.mktemp("rtd")
    curves.write_sources(folder)
    case = CASES["objective rtd"] | {
        "train": {"steps": 6, "global_batch_size": 8, "ema_decay": 0.5}
    }
    path = curves.run_file(folder, "rtd", case)
    assert main(["prepare", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def run(prepared):
    """The run directory, trained."""
    assert main(["train", str(prepared)]) == 0
    return prepared.with_name("runs") / "rtd"


@pytest.fixture(scope="module")
def saved(prepared):
    """A run directory of the same models with random weights."""
    folder = prepared.with_name("runs") / "saved"
    folder.parent.mkdir(exist_ok=True)
    return save_run(load_run(prepared, [f"dir={folder}", "train.ema_decay=none"]), (1,), std=0.3)


def lines_of(run, kind):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_a_step_from_the_compile_cache_runs(prepared):
    """Over several devices, as in no run of this process: XLA orders collectives inside a
    conditional only in what it has compiled itself."""
    told = os.environ | {"JAX_DEBUG_LOG_MODULES": "jax._src.compiler"}
    folders = [prepared.with_name("runs") / name for name in ("first", "again")]
    for folder in folders:
        command = [sys.executable, "-m", "lmwright", "train", prepared, f"dir={folder}"]
        done = subprocess.run(command, env=told, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    assert "compilation cache hit for 'jit_train_step'" in done.stderr
    first, again = ([line["loss"] for line in lines_of(each, "train")] for each in folders)
    assert first == again


def test_held_out_rows_say_how_well_it_detects(run, capsys):
    trained, held_out = lines_of(run, "train")[-1], lines_of(run, "eval")[-1]
    for said in (trained, held_out):
        assert 0 < said["detector_loss"] < 1 and 0 < said["replaced_share"] <= 1
    assert "bits_per_byte" not in held_out
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text("utf-8")
    assert "detector accuracy, masked" in page and "detector recall, masked" in page
    assert main(["eval", str(run)]) == 0
    assert "masked: detector loss 0." in capsys.readouterr().out


def test_the_discriminator_is_exported_with_both_tables(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    assert "no class with a head for replaced tokens" in capsys.readouterr().out
    _, w = load_run_weights(run)
    both = w["generator"]["embed"] + w["discriminator"]["embed"]
    assert np.abs(w["discriminator"]["embed"]).max() > 0
    loaded = load_model(out)
    model, found = loaded.model, dict(walk(loaded.weights))
    np.testing.assert_array_equal(found["embed"], both)
    theirs, report = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    with torch.no_grad():
        states = theirs.eval()(input_ids=torch.tensor(TOKENS)).last_hidden_state.numpy()
    ours = model.encoder.hidden(loaded.weights, make_batch(TOKENS), Compute())[0]
    assert_near(ours, states, "hidden states")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(out, num_labels=3)
    assert theirs.deberta.embeddings.word_embeddings.weight.shape == both.shape
    assert "feature-extraction" in (out / "README.md").read_text()
    again = tmp_path / "again"
    assert main(["import", str(out), str(again)]) == 0
    assert main(["verify", str(out), str(again)]) == 0


def test_the_generator_is_exported_by_name(saved, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(saved), str(out), "--part", "generator"]) == 0
    said = capsys.readouterr().out
    assert "result in lmwright and transformers" in said
    fill = transformers.AutoModelForMaskedLM.from_pretrained(out).eval()
    assert fill.config.num_hidden_layers == 1
    with torch.no_grad():
        theirs = fill(input_ids=torch.tensor(TOKENS)).logits.numpy()
    loaded = load_model(out)
    hidden = loaded.model.hidden(loaded.weights, make_batch(TOKENS), Compute())[0]
    assert_near(loaded.model.logits(loaded.weights, hidden), theirs, "logits")
    assert main(["export", str(out), str(tmp_path / "x"), "--part", "generator"]) == 2
    assert "is not a run directory, so it has no part 'generator'" in capsys.readouterr().err


@pytest.mark.parametrize("from_export", [False, True])
def test_a_classifier_starts_from_the_discriminator(from_export, run, tmp_path):
    """From the run as from its export: with a fresh head, and open in transformers."""
    folder, origin = run.parents[1], run
    if from_export:
        origin = tmp_path / "origin"
        assert main(["export", str(run), str(origin)]) == 0
    case = CASES["objective classify"] | {
        "model": CASES["objective rtd"]["model"],
        "train": {"steps": 6, "global_batch_size": 8, "init_from": str(origin)},
        "optim": {"learning_rate": 1e-9},
    }
    path = curves.run_file(folder, f"classes {from_export}", case)
    path.write_text(path.read_text().replace("data-text", "data-masked"))
    for verb in ("prepare", "train"):
        assert main([verb, str(path)]) == 0
    classes, out = folder / "runs" / f"classes-{from_export}", tmp_path / "out"
    assert json.loads((classes / "init.json").read_text())["fresh"] == ["classifier"]
    first, both = (load_run_weights(place)[1] for place in (classes, run))
    wanted = both["generator"]["embed"] + both["discriminator"]["embed"]
    np.testing.assert_allclose(first["embed"], wanted, atol=1e-6)
    assert main(["export", str(classes), str(out)]) == 0
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor(TOKENS)).logits.numpy()
    loaded = load_model(out)
    ours = loaded.model.classify(loaded.weights, make_batch(TOKENS), Compute())[0][:, 0]
    assert_near(ours, logits, "logits")


def test_what_it_is_not(saved, tmp_path, capsys):
    """One line and its cure, whatever else is asked of it."""
    for words, said in (
        (["export", saved, tmp_path / "x.gguf"], "DebertaV2Model"),
        (["generate", saved, "--prompt", "a"], "is an encoder"),
        (["predict", saved, tmp_path / "x.txt"], "is not a classifier"),
        (["vocab", saved, tmp_path / "y", "--add", "zzz"], "is a detector"),
    ):
        (tmp_path / "x.txt").write_text("a\n")
        assert main([str(word) for word in words]) == 2, words
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
