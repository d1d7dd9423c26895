"""Masked pretraining by the command line with shares that move and whole words: stopped on the way,
continued, measured."""

import json
import os
import signal

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.formats.open import load_run
from lmwright.train.hooks import Hook
from lmwright.train.session import train

WORDS = "unremembered sailors counting stones beside the morning neighbor forgets".split()
RUN = """
recipe = "pretrain-encoder"
name = "t"
dir = "{dir}/run"
[model]
kind = "eurobert"
vocab_size = 300
embed_dim = 32
mlp_dim = 48
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
seq_len = 48
[objective]
mask_ratio = {{start = 0.6, end = 0.1}}
kept_share = {{start = 0.0, end = 0.5}}
unit = "word"
[data]
dir = "{dir}/data"
workers = 1
holdout_fraction = 0.1
sources = [{{path = "{dir}/text.jsonl"}}]
[train]
steps = 40
global_batch_size = 8
precision = "fp32"
remat = "none"
[optim]
learning_rate = 1e-3
schedule = {{kind = "constant"}}
[metrics]
log_every_steps = 1
trackers = []
"""


class Stop(Hook):
    """Asks the run to stop after a step."""

    def after_step(self, session, done):
        if done == 25:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run file, its data, and the run that was trained without a stop."""
    folder = tmp_path_factory.mktemp("masked")
    dice = np.random.default_rng(3)
    lines = [{"text": " ".join(dice.choice(WORDS, 12))} for _ in range(90)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.toml").write_text(RUN.format(dir=folder))
    assert main(["prepare", str(folder / "run.toml")]) == 0
    assert main(["train", str(folder / "run.toml")]) == 0
    return folder


def logged(path, kind):
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_a_run_that_stops_and_goes_on_hides_the_same_tokens(folder):
    run = load_run(folder / "run.toml", [f"dir={folder}/stopped"])
    assert train(run, jax.devices()[:1], hooks=[Stop()]).step == 25
    assert main(["train", str(folder / "stopped")]) == 0
    names = ("step", "loss", "grad_norm", "target_tokens")
    whole, parts = (
        [[line[name] for name in names] for line in logged(folder / name, "train")]
        for name in ("run", "stopped")
    )
    assert whole == parts and len(whole) == 40
    tokens = [line[-1] for line in whole]
    assert tokens[0] > 3 * tokens[-1]


def test_a_grown_model_begins_below_a_fresh_one(folder):
    """Of the same size, on the same masks."""
    sizes = ["embed_dim=48", "num_layers=3", "num_heads=6", "num_kv_heads=3"]
    assert main(["grow", str(folder / "run"), str(folder / "large"), *sizes]) == 0
    text = (folder / "run.toml").read_text()
    before, rest = text.split("[model]")
    (folder / "larger.toml").write_text(before + "[objective]" + rest.split("[objective]")[1])
    larger = [f"model.{size}" for size in sizes]
    fresh = [str(folder / "run.toml"), f"dir={folder}/fresh", *larger]
    grown = [str(folder / "larger.toml"), f"dir={folder}/grown", f"train.init_from={folder}/large"]
    for words in (fresh, grown):
        assert main(["train", *words, "train.steps=1"]) == 0
    fresh, grown = (logged(folder / name, "train")[0]["loss"] for name in ("fresh", "grown"))
    assert grown < fresh - 1


def test_eval_hides_the_same_words_as_training_does(folder, capsys):
    (line,) = logged(folder / "run", "eval")[-1:]
    assert main(["eval", str(folder / "run"), "--precision", "fp32"]) == 0
    row = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("text"))
    assert row.split()[1:3] == [str(int(line["tokens"])), f"{line['loss']:.4f}"]
    assert "pieces" not in (folder / "run" / "run.toml").read_text()
