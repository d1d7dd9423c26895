"""A tiny prepared store and a run over it, shared by the resume tests."""

import json
import random
from dataclasses import replace

import pytest

from lmwright.config.run import Checkpoint, Data, Eval, Metrics, Pack, Run, Source, Tokenizer, Train
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from tests.resume.small_runs import STEPS, in_dir


@pytest.fixture(scope="session")
def small_run(run_of_two_layers) -> Run:
    """A run whose data is prepared; give it a `dir` of its own before training."""
    return replace(run_of_two_layers, model=replace(run_of_two_layers.model, num_layers=1))


@pytest.fixture(scope="session")
def run_of_two_layers(tmp_path_factory) -> Run:
    """The same with two layers, where a stage or a file has to tell them apart."""
    from lmwright.data.prepare import prepare

    root = tmp_path_factory.mktemp("small")
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(60)]
    for name, count in (("train", 220), ("heldout", 20)):
        lines = [json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(5, 60)))})
                 for _ in range(count)]  # fmt: skip
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    run = Run(
        name="small",
        dir=str(root / "run"),
        model=Llama(
            vocab_size=320, embed_dim=32, mlp_dim=48, num_layers=2, num_heads=4,
            num_kv_heads=2, head_dim=8, seq_len=32,
        ),
        objective=Clm(),
        optim=KINDS["adamw"](learning_rate=3e-3),
        data=Data(
            dir=str(root / "data"),
            workers=1,
            sources=(
                Source(path=str(root / "train.jsonl")),
                Source(path=str(root / "heldout.jsonl"), use="eval"),
            ),
            tokenizer=Tokenizer(vocab_size=300),
            pack=Pack(method="best-fit"),
        ),
        train=Train(steps=STEPS, global_batch_size=4, num_microbatches=2, precision="fp32"),
        eval=Eval(every_steps=6),
        checkpoint=Checkpoint(save_every_steps=3, keep_last=2),
        metrics=Metrics(log_every_steps=1, trackers=()),
    )  # fmt: skip
    prepare(run.data, run.model.seq_len)
    return run


@pytest.fixture(scope="session")
def trained_run(small_run, tmp_path_factory) -> Run:
    """A run that has done its steps; copy its directory before changing anything."""
    import jax

    from lmwright.train.session import train

    run = in_dir(small_run, tmp_path_factory.mktemp("trained") / "run")
    assert train(run, jax.devices()[:1]).exit_code == 0
    return run


@pytest.fixture
def one_device(monkeypatch):
    """The tests have eight; `lmwright train` takes one, as the trained run did."""
    import jax

    from lmwright.train import command

    train = command.train
    monkeypatch.setattr(command, "train", lambda run, **k: train(run, jax.devices()[:1], **k))
