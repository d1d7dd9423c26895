"""The bias that balances experts: moved by counts after the step, by no optimizer; the steps
after a restored state are those of a run that was never stopped."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from lmwright.config.run import Data, Run, Train
from lmwright.core.param import walk
from lmwright.models.experts import Experts
from lmwright.models.moe import Dots1
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.lora_section import LowRank
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_state, init_state
from lmwright.program.step import make_step, summed_gradients

MODEL = Dots1(
    vocab_size=31, embed_dim=16, mlp_dim=20, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=6, seq_len=24, dense_layers=(0,),
    experts=Experts(
        num_experts=6, experts_per_token=2, mlp_dim=8, shared_dim=8, score="sigmoid",
        bias_rate=0.05,
    ),
)  # fmt: skip


def run_of(**train):
    return Run(
        name="t", dir="unused", model=MODEL, objective=Clm(),
        optim=KINDS["adamw"](learning_rate=1e-2, clip_norm=0.1, weight_decay=0.1),
        data=Data(dir="unused"),
        train=Train(**{"steps": 9, "global_batch_size": 4, "precision": "fp32"} | train),
    )  # fmt: skip


@pytest.mark.parametrize("base", ["bf16", "int8"])
def test_beside_adapters_it_is_frozen_in_float32(base):
    """Rounded, it would choose other experts than the base does."""
    run = replace(run_of(), lora=LowRank(base=base, rank=2, targets=("attention",)))
    frozen = dict(walk(abstract_state(resolve(run, jax.devices()[:1]))["frozen"]))
    found = {path: str(leaf.dtype) for path, leaf in frozen.items() if "router" in path}
    assert {v for path, v in found.items() if path.endswith("router_bias")} == {"float32"}
    assert {v for path, v in found.items() if path.endswith("router")} == {"bfloat16"}


def rows(step, pieces):
    from lmwright.core.contract import Batch

    rng = np.random.default_rng(step)
    shape = (pieces, 4 // pieces, 24)
    segments = np.ones((4, 24), "i4")
    segments[1, 15:] = 0
    segments = segments.reshape(shape)
    return Batch(
        tokens=(31 * rng.random((4, 24)) ** 2).astype("i4").reshape(shape),
        segment_ids=segments,
        positions=np.broadcast_to(np.arange(24, dtype="i4"), shape).copy(),
        loss_weight=segments.astype("f4"),
    )


def weights_of(state):
    return state["trained"]["model"]["weights"]


@cache
def compiled(pieces):
    """The plan of a run, and its step."""
    plan = resolve(run_of(num_microbatches=pieces), jax.devices()[:1])
    return plan, make_step(plan)


@pytest.mark.parametrize("pieces", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_moves_the_bias_by_its_rate(pieces):
    plan, step = compiled(pieces)
    state = init_state(plan)
    before = dict(walk(jax.tree.map(np.asarray, weights_of(state))))
    batch = rows(0, pieces)
    trainees, keys = plan.training.trainees, [jax.random.key(0)]
    gradients = jax.jit(lambda w: summed_gradients(plan, trainees, {}, {"model": w}, batch, keys))
    grads = gradients(weights_of(state))[0]["model"]
    above = dict(walk(jax.tree.map(np.asarray, grads)))["layers.router_bias"]  # [2, 6]
    others = [np.ravel(g) for path, g in walk(grads) if path != "layers.router_bias"]
    norm = np.linalg.norm(np.concatenate(others))
    state, metrics = step(state, batch)
    after = dict(walk(jax.tree.map(np.asarray, weights_of(state))))
    moved = after["layers.router_bias"] - before["layers.router_bias"]
    np.testing.assert_allclose(moved, -0.05 * np.sign(above), rtol=1e-6)
    assert (np.abs(moved) > 0).any(axis=1).all() and above.sum() == pytest.approx(0, abs=1e-2)
    weight = metrics["target_tokens"]
    np.testing.assert_allclose(metrics["grad_norm"], norm / weight, rtol=1e-5)
    assert not any(
        "router_bias" in path for path, _ in walk(state["trained"]["model"]["optimizer"])
    )


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 2])
def test_it_evens_the_load_out_and_goes_on_after_a_restart(pieces):
    plan, step = compiled(pieces)
    state, first = step(init_state(plan), rows(0, pieces))
    for k in range(1, 6):
        state, _ = step(state, rows(k, pieces))
    kept = jax.tree.map(np.asarray, state)  # what a checkpoint holds
    state, last = step(state, rows(6, pieces))
    again, _ = step(jax.device_put(kept), rows(6, pieces))
    jax.tree.map(np.testing.assert_array_equal, state, again)
    assert np.any(weights_of(kept)["layers"]["router_bias"])
    assert last["router_busiest"] < first["router_busiest"]
    assert last["router_dropped"] == 0


def test_without_a_rate_there_is_no_bias():
    model = replace(MODEL, experts=replace(MODEL.experts, bias_rate=None))
    assert not any("router_bias" in path for path, _ in walk(model.spec()))
