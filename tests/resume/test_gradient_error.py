"""A run whose gradients are not exact says by how much, on its own rows, and keeps it."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.core.contract import Batch
from lmwright.core.param import walk
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.stores import open_stores
from lmwright.report.html import render
from lmwright.report.read import read_run
from lmwright.train import gradient_error
from lmwright.train.identity import identity
from lmwright.train.session import train
from tests.resume.small_runs import in_dir, logged


@pytest.fixture(scope="module")
def fresh(small_run, tmp_path_factory):
    """A run that keeps block inputs in 8 bits, before its first step."""
    fields = {"remat": "block", "block_inputs": "int8", "steps": 2}
    run = in_dir(small_run, tmp_path_factory.mktemp("bits") / "run")
    return replace(
        run,
        model=replace(run.model, embed_dim=64),
        train=replace(run.train, **fields),
        checkpoint=replace(run.checkpoint, save_every_steps=1),
        eval=replace(run.eval, every_steps=None),
    )


@pytest.fixture(scope="module")
def run(fresh):
    """The run whose two steps are done."""
    train(fresh, jax.devices()[:1])
    return fresh


def gradients(plan, state, batch, block_inputs):
    """By `jax.grad` of the objective's own loss."""
    compute = replace(plan.compute, block_inputs=block_inputs)

    def loss(weights):
        keys = jax.random.split(jax.random.key(0), len(batch.tokens))
        return plan.run.objective.loss(plan.run.model, weights, batch, keys, compute).total

    return jax.jit(jax.grad(loss))(state["trained"]["model"]["weights"])


def test_it_is_measured_on_the_first_rows(run):
    (event,) = logged(run, "gradient error")
    assert event["step"] == 0 and event["setting"] == "train.block_inputs = int8"
    plan = resolve(run, jax.devices()[:1])
    assert (event["rows"], event["tokens"]) == (2, plan.seq_len)  # of a microbatch
    arrays = open_stores(plan)["model"].batch(0, 2)
    batch = Batch(**{name: arrays[name] for name in Batch.__dataclass_fields__})
    exact, ours = (gradients(plan, init_state(plan), batch, k) for k in ("exact", "int8"))
    pairs = {
        path: (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for (path, a), (_, b) in zip(walk(exact), walk(ours), strict=True)
    }

    def error(paths):
        there, here = (np.concatenate([pairs[p][i].ravel() for p in paths]) for i in (0, 1))
        return np.linalg.norm(here - there) / np.linalg.norm(there)

    assert event["error"] == pytest.approx(error(pairs), rel=1e-3)
    assert 0 < event["error"] < 0.05 and 0.999 < event["cosine"] < 1
    assert event["q error"] == pytest.approx(error(["layers.q"]), rel=1e-3)
    norms = ["norm", "layers.attention_norm", "layers.mlp_norm"]
    assert event["norms error"] == pytest.approx(error(norms), rel=1e-3)


def test_it_is_measured_again_where_a_run_goes_on(run, capsys):
    longer = replace(run, train=replace(run.train, steps=3))
    train(longer, jax.devices()[:1])
    events = logged(run, "gradient error")
    assert [event["step"] for event in events] == [0, 2]
    assert "train.block_inputs = int8 changes gradients by" in capsys.readouterr().out
    page = render([read_run(run.dir)])
    assert f"{events[1]['error']:.2%} at step 2, by train.block_inputs = int8" in page


def test_exact_runs_measure_nothing(trained_run):
    assert not logged(trained_run, "gradient error")


def test_it_makes_another_run(run):
    exact = replace(run, train=replace(run.train, block_inputs="exact"))
    assert identity(run) != identity(exact)


def test_fewer_rows_and_then_less_of_one_where_memory_is_short(fresh, monkeypatch):
    """What does not fit is not compared; what is left is."""
    plan, tried = resolve(fresh, jax.devices()[:1]), []

    def compare(plan, exact, trainee, state, batch):
        tried.append((*batch.tokens.shape[1:], exact.compute.offload, exact.compute.block_inputs))
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm"
        )

    monkeypatch.setattr(gradient_error, "compare", compare)
    (trainee,), stores = plan.training.trainees, open_stores(plan)
    assert gradient_error.measure(plan, trainee, init_state(plan), stores["model"]) is None
    seq_len = plan.seq_len
    assert tried == [
        (2, seq_len, "none", "exact"),
        (1, seq_len, "none", "exact"),
        (1, seq_len, "block_inputs", "exact"),
    ]
