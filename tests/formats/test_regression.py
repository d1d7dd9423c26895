"""Numbers for pairs of texts: from a run to transformers, to cross encoders, to `predict`, to
`eval` and to the runs that start from it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import lmwright.api as lm
from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.config.run import Tokenizer
from lmwright.core.param import walk
from lmwright.errors import UserError
from lmwright.evals.held_out import open_held_out
from lmwright.evals.numbers import Fit, ranks
from lmwright.evals.predict import predict_command
from lmwright.formats.adapter_verbs import export_adapter_command, merge_command
from lmwright.formats.convert import export_command
from lmwright.formats.hf_read import model_from_config, read_config
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run
from lmwright.models.modernbert import ModernBert
from lmwright.objectives.classify import Classify
from lmwright.objectives.mlm import Mlm
from lmwright.program.lora_section import LowRank
from lmwright.train.session import train
from tests.labeled_run import NUMBERS, PAIRS, SIZES, labeled_run
from tests.saved_run import save_run

EXACT = {"precision": "fp32", "pair_column": "text_pair"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with random weights."""
    model = ModernBert(mlp_dim=20, window=9, **SIZES | {"num_kv_heads": 4})
    run = labeled_run(tmp_path_factory.mktemp("numbers"), model, numbers=True)
    save_run(run, steps=(1,), std=0.3)
    return run


@pytest.fixture(scope="module")
def exported(run):
    out = f"{run.dir}-exported"
    proof = export_command(run.dir, out)
    there = proof.folder_to_transformers
    assert there is None or there.max_abs_diff <= 1e-5 * max(1, there.max_abs_logit)
    return out


def scores(model, tmp_path, capsys=None, **said):
    """What `predict` writes of PAIRS."""
    file, out = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    rows = [{"text": a, "text_pair": b, "label": n}
            for (a, b), n in zip(PAIRS, NUMBERS, strict=True)]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    predict_command(str(model), str(file), out=str(out), overwrite=True, **EXACT, **said)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_export_gives_the_number_in_transformers(run, exported, tmp_path):
    """By its pipeline without a function, and as the run itself."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    pipe = transformers.pipeline("text-classification", model=exported, device="cpu")
    asked = [{"text": a, "text_pair": b} for a, b in PAIRS]
    theirs = [pipe(each, truncation=True, function_to_apply="none")["score"] for each in asked]
    assert pipe.model.config.problem_type == "regression"
    for model in (run.dir, exported):
        ours = scores(model, tmp_path)
        assert set(ours[0]) <= {"row", "id", "score", "cut"}
        np.testing.assert_allclose([line["score"] for line in ours], theirs, atol=1e-5)
        assert 0 < sum("cut" in line for line in ours) < len(PAIRS)
    card = (load_model(exported).path / "README.md").read_text()
    assert 'classify("A text", truncation=True, function_to_apply="none")' in card


def test_texts_without_their_pairs_are_told(run, exported, tmp_path, capsys):
    """Of a run, which knows that it learned from pairs."""
    moved = Path(shutil.copytree(run.dir, tmp_path / "run"))
    source = replace(run.data.sources[0], columns={"text_pair": "passage"})
    named = replace(run, dir=str(moved), data=replace(run.data, sources=(source,)))
    (moved / "run.toml").write_text(dump_toml(named))
    (tmp_path / "a.txt").write_text("a text\n")
    note = (
        "run learned from pairs of texts (columns.text_pair = 'passage'), and texts are read alone"
    )
    for model in (moved, exported):
        found = lm.predict(model, "a text", precision="fp32")
        assert ("second ones by pairs" in capsys.readouterr().err) == (model == moved)
        assert main(["predict", str(model), str(tmp_path / "a.txt"), "--precision", "fp32"]) == 0
        told = capsys.readouterr()
        assert json.loads(told.out.splitlines()[0])["score"] == pytest.approx(found[0]["score"])
        assert (f"{note}; give their second ones by --pair-column" in told.err) == (model == moved)
    for name, text in (
        ("a.csv", "text,text_pair\na,b\n"),
        ("a.jsonl", '{"text": "a", "text_pair": "b"}'),
    ):
        (tmp_path / name).write_text(text)
        assert main(["predict", exported, str(tmp_path / name), "--precision", "fp32"]) == 0
        assert "note: there is a column 'text_pair', and texts" in capsys.readouterr().err
    scores(moved, tmp_path)
    lm.predict(moved, "a text", "another", precision="fp32")
    assert "pairs" not in capsys.readouterr().err


def test_the_export_is_a_cross_encoder(exported, tmp_path):
    """Which ranks passages by the same numbers."""
    sentences = pytest.importorskip("sentence_transformers")
    theirs = sentences.CrossEncoder(exported, device="cpu").predict(PAIRS)
    ours = [line["score"] for line in scores(exported, tmp_path)]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_known_numbers_are_compared(run, tmp_path, capsys):
    """Squared error, correlations as scipy's, and the texts that are farthest off."""
    found = scores(run.dir, tmp_path, label_column="label")
    said = capsys.readouterr().out
    assert [line["expected"] for line in found] == NUMBERS
    given = np.array([line["score"] for line in found])
    row = re.search(r"^pairs.jsonl +60 +(\S+) +(\S+) +(\S+) +(\S+)$", said, re.M)
    wanted = (
        np.mean((given - NUMBERS) ** 2), np.var(NUMBERS), stats.pearsonr(given, NUMBERS)[0],
        stats.spearmanr(given, NUMBERS)[0],
    )  # fmt: skip
    np.testing.assert_allclose([*map(float, row.groups())], wanted, atol=6e-5)
    worst = found[int(np.argmax(np.abs(given - NUMBERS)))]
    assert re.search(r"farthest: (\S+),", said)[1] == worst["id"] and said.count("farthest") == 5
    with pytest.raises(UserError, match=r"pairs.jsonl:1: text 'the cat .*' is not a finite number"):
        scores(run.dir, tmp_path, label_column="text")


def test_scores_are_those_of_scipy():
    rng = np.random.default_rng(0)
    real, given = rng.integers(0, 5, 40), np.round(rng.normal(size=40), 1)
    np.testing.assert_array_equal(ranks(given), stats.rankdata(given))
    fit = Fit.of(np.stack([real, given], 1))
    assert fit.spearman == pytest.approx(stats.spearmanr(real, given)[0], abs=1e-12)
    assert fit.pearson == pytest.approx(stats.pearsonr(real, given)[0], abs=1e-12)
    flat = Fit.of(np.array([[1.0, 2.0], [1.0, 3.0]]))
    assert (flat.pearson, flat.spearman, flat.of_mean, flat.mse) == (0, 0, 0, 2.5)
    # in floats, three times 0.1 has another mean
    assert Fit.of(np.array([[0.1, 0.7]] * 3)).pearson == 0
    assert Fit.of(np.zeros((0, 2))).averages() == {"pearson": 0.0, "spearman": 0.0}


def test_held_out_numbers(run, tmp_path, capsys):
    """Those that `predict` gives to the same texts."""
    opened = open_held_out(run.dir, precision="fp32")
    (loss,) = opened.held_out.losses(opened.weights)
    ours = [line["score"] for line in scores(run.dir, tmp_path)][-10:]
    wanted = sorted(zip(NUMBERS[-10:], ours, strict=True))
    np.testing.assert_allclose(sorted(map(tuple, loss.numbers)), wanted, atol=1e-5)
    assert loss.loss == pytest.approx(np.mean([(a - b) ** 2 for a, b in wanted]), rel=1e-5)
    assert main(["eval", run.dir]) == 0
    said = capsys.readouterr().out
    assert "Spearman" in said and "of the mean" in said


def test_training_from_an_encoder_and_on(run, exported, tmp_path, capsys):
    """Losses fall, and the scores are in metrics.jsonl; a head of numbers goes on, one of classes
    does not."""
    masked = replace(run, dir=str(tmp_path / "mlm"), objective=Mlm(mask_token_id=1))
    save_run(masked, steps=(1,), std=0.3)
    export_command(masked.dir, tmp_path / "base")
    (tmp_path / "run.toml").write_text(
        f"""
        recipe = "finetune-regression"
        name = "numbers"
        dir = "{tmp_path / "run"}"
        optim.learning_rate = 0.01
        data.dir = "{run.data.dir}"
        metrics.trackers = []
        checkpoint.save_every_steps = 20
        [train]
        steps = 20
        global_batch_size = 8
        precision = "fp32"
        init_from = "{tmp_path / "base"}"
        """
    )
    made = load_run(tmp_path / "run.toml")
    assert made.model.kind == "modernbert" and made.objective.kind == "regress"
    train(made)
    said = capsys.readouterr().out
    assert "fresh ones for classifier" in said
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    (held,) = [line for line in lines if line["kind"] == "eval"][-1:]
    assert {"loss", "pearson", "spearman"} <= set(held) and not {"ppl", "bits_per_byte"} & set(held)
    starts = {"numbers": exported, "classes": f"{tmp_path}/classes"}
    classes = replace(run, dir=starts["classes"], objective=Classify(labels=("a", "b")))
    save_run(classes, steps=(1,), std=0.3)
    theirs = dict(walk(load_model(exported).weights))["classifier.out"]
    for name, origin in starts.items():
        again = load_run(
            tmp_path / "run.toml",
            [f"train.init_from={origin}", f"dir={tmp_path / name}-again", "train.steps=1",
             "optim.learning_rate=1e-9"],
        )  # fmt: skip
        train(again)
        ours = dict(walk(load_model(again.dir).weights))["classifier.out"]
        assert np.allclose(ours, theirs, atol=1e-6) == (name == "numbers")


def test_adapters_of_numbers(run, tmp_path):
    """To PEFT's folder and into their base again."""
    masked = replace(run, dir=str(tmp_path / "mlm"), objective=Mlm(mask_token_id=1))
    save_run(masked, steps=(1,), std=0.3)
    export_command(masked.dir, tmp_path / "base")
    data = replace(run.data, tokenizer=Tokenizer(path=str(tmp_path / "base")))
    lora = replace(
        run, dir=str(tmp_path / "lora"), data=data, lora=LowRank(base="fp32", rank=2),
        train=replace(run.train, init_from=str(tmp_path / "base")),
    )  # fmt: skip
    save_run(lora, steps=(1,), std=0.3)
    export_adapter_command(lora.dir, tmp_path / "adapter")
    proof = merge_command(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert proof.merged_to_peft is not None or "not installed" in proof.peft
    ours, theirs = (
        [line["score"] for line in scores(place, tmp_path)]
        for place in (lora.dir, tmp_path / "merged")
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_what_is_read_and_refused(run, exported):
    config = read_config(load_model(exported).path)
    assert config["problem_type"] == "regression" and config["id2label"] == {"0": "LABEL_0"}
    plain = {k: v for k, v in config.items() if k not in ("problem_type", "sentence_transformers")}
    assert model_from_config(plain, "config.json") == load_model(exported).model
    two = config | {"id2label": {"0": "a", "1": "b"}}
    with pytest.raises(UserError, match="gives 2 numbers, and only one is supported"):
        model_from_config(two, "config.json")
    with pytest.raises(UserError, match="problem_type 'ranking' is not"):
        model_from_config(config | {"problem_type": "ranking"}, "config.json")
    other = replace(run, objective=Classify(labels=("a", "b")))
    with pytest.raises(UserError, match=r"holds texts with a number, which .*'classify' cannot"):
        train(replace(other, dir=f"{run.dir}-other", train=replace(run.train, global_batch_size=8)))
