"""Weights that compute rounded ([qat]) over devices give the gradients of one: a group may lie on
several of them, and experts do."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.leaves import Rounded
from lmwright.models.experts import Experts
from lmwright.models.moe import Mixtral
from lmwright.nn.moe import Dispatch, mixture
from lmwright.program.lora_section import LowRank
from lmwright.program.qat_section import Qat
from tests.sharded import problem
from tests.sharded.problem import assert_same, gradients, make_run, plan_of
from tests.sharded.test_experts import BIASED, PLACES, SOFTMAX, stirred
from tests.sharded.test_sharded_lora import MODEL, two_steps

QAT = Qat(weights="int4", group_size=8)


def run_of(axes=None, **train):
    return replace(make_run(axes, **train), qat=QAT)


@cache
def alone():
    return gradients(run_of())


@pytest.mark.parametrize(
    "axes, train",
    [
        ({"fsdp": 2, "context": 2, "tensor": 2}, {"num_microbatches": 2, "remat": "dots"}),
        pytest.param(
            {"stage": 2, "context": 2, "tensor": 2}, {"num_microbatches": 4},
            marks=pytest.mark.slow,
        ),
        pytest.param({"data": 2, "fsdp": 4}, {"mlp_chunk_tokens": 16}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_gradients(axes, train):
    assert_same(gradients(run_of(axes, **train)), alone())


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, axes",
    [
        (BIASED, {"fsdp": 2, "expert": 2, "tensor": 2}),
        (PLACES, {"data": 2, "expert": 4}),
        (SOFTMAX, {"fsdp": 4, "context": 2}),
    ],
)
def test_gradients_of_experts(model, axes, monkeypatch):
    """Of mixtures, shared experts and reasoning layers; what starts at zero is given values."""
    fresh = problem.fresh_weights
    monkeypatch.setattr(problem, "fresh_weights", lambda m: jax.tree.map(stirred, fresh(m)))
    over, one = (replace(make_run(a), model=model, qat=QAT) for a in (axes, None))
    assert_same(gradients(over), gradients(one))


@pytest.mark.parametrize("capacity", [None, 1.5])
def test_rounded_inputs_of_experts(capacity):
    """Scales of tokens whose inner values are on several devices: an input in many thousands may
    lie so close between two integers that it falls otherwise, and there is none here."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype("f4")  # noqa: E731
    x, shares, ids = draw(4, 8, 24), draw(4, 8, 2), rng.integers(0, 8, (4, 8, 2)).astype("i4")
    shapes = {"up": (8, 24, 16), "gate": (8, 24, 16), "down": (8, 16, 24)}
    w = {name: 0.2 * draw(*shape) for name, shape in shapes.items()}
    dispatch, real = Dispatch(8, capacity_factor=capacity), np.ones((4, 8), bool)

    def gradients_of(x, w):
        def total(x, w):
            held = {
                name: Rounded(a, None, "int4", 8, "int8", inputs=1, outputs=1)
                for name, a in w.items()
            }
            y, _ = mixture(x, ids, shares, real, held, dispatch)
            return jnp.sum(jnp.sin(y)), y

        (_, y), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(x, w)
        return y, grads

    with jax.set_mesh(plan_of(make_run({"fsdp": 2, "expert": 2, "tensor": 2})).mesh):
        found = jax.jit(gradients_of)(x, w)
    want = jax.jit(gradients_of)(x, w)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), found, want
    )


MIXTURE = Mixtral(
    vocab_size=64, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    seq_len=16, experts=Experts(num_experts=4, experts_per_token=2, mlp_dim=32),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, mesh",
    [
        (MODEL, {"fsdp": 2, "tensor": 2, "stage": 2}),
        (MIXTURE, {"fsdp": 2, "tensor": 2, "expert": 2}),
    ],
)
def test_an_adapter_inside_the_rounding(model, mesh):
    """Two steps of factors and scales, those of experts among them."""
    lora, one = LowRank(base="fp32", rank=6), {"model": model, "qat": QAT}
    (weights, metrics), _ = two_steps(lora, 1, **one)
    (found, others), _ = two_steps(lora, 8, **one, **mesh)
    for name, value in metrics.items():
        np.testing.assert_allclose(others[name], value, rtol=2e-4, atol=1e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), found, weights)
