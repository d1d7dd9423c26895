"""Adapters on experts over devices give the single device's loss, metrics and gradients, which
tests/resume/test_lora_experts.py compares with PEFT."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.leaves import Lora
from lmwright.core.param import Param
from lmwright.core.quantize import quantize
from lmwright.core.sharding import AXES, make_mesh
from lmwright.errors import UserError
from lmwright.nn import exchange
from lmwright.nn.moe import Dispatch, mixture
from lmwright.program.lora_section import LowRank
from lmwright.program.step import summed_gradients
from tests.sharded.problem import assert_same, make_batch, plan_of
from tests.sharded.test_experts import BIASED, OSS, PLACES, SOFTMAX, run_of, stirred

ALL = LowRank(targets=("all",), rank=3, base="fp32")
INT8, INT4 = replace(ALL, base="int8"), replace(ALL, base="int4")
BESIDE = LowRank(targets=("attention",), rank=3, base="int8")  # experts without adapters
CASES = [
    (OSS, INT8, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (PLACES, ALL, {"fsdp": 4, "expert": 2}),
    (SOFTMAX, INT8, {"fsdp": 2, "context": 2, "tensor": 2}),
    (OSS, ALL, {"expert": 2, "context": 2, "tensor": 2}),
    (OSS, ALL, {"fsdp": 8}),
    (SOFTMAX, ALL, {"data": 2, "expert": 4}),
    (SOFTMAX, INT4, {"fsdp": 4, "expert": 2}),
    (SOFTMAX, BESIDE, {"fsdp": 2, "expert": 4}),
    (BIASED, ALL, {"fsdp": 4, "tensor": 2}),
]


def gradients(model, lora, axes=None, pieces=1):
    """Gradients of factors none of which is zero, and the loss's sums, as numpy arrays."""
    run = run_of(model, axes, num_microbatches=pieces)
    plan, batch = plan_of(replace(run, lora=lora)), make_batch(pieces)
    (trainee,), key = plan.training.trainees, jax.random.key(0)
    held = jax.tree.map(lambda leaf: leaf.sharding, plan.training.abstract_frozen(plan.mesh))
    with jax.set_mesh(plan.mesh):
        frozen = jax.device_put(jax.jit(plan.training.make_frozen)(key), held)
        w = jax.jit(plan.training.init, static_argnums=0)(trainee, frozen, key)
        w = jax.tree.map(stirred, w)
        w = {"default": jax.device_put(w, plan.training.shardings(trainee, plan.mesh))}
        fn = jax.jit(lambda f, w, b: summed_gradients(plan, (trainee,), f, w, b, [key]))
        grads, losses = jax.device_get(fn(frozen, w, batch))
    return grads, losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "lora", "axes"), CASES)
def test_devices_equal_one(model, lora, axes, monkeypatch):
    monkeypatch.setattr(exchange, "TILE", 8)  # several rounds
    assert_same(gradients(model, lora, axes), gradients(model, lora))


@pytest.mark.slow
def test_a_pipeline():
    """Each piece on its way has a busiest expert of its own; all else is the same."""
    model = replace(SOFTMAX, reasoning=None)
    found = gradients(model, INT4, {"stage": 2, "expert": 2, "tensor": 2}, pieces=2)
    want = gradients(model, INT4)
    for _, loss in (found, want):
        del loss.metrics["router_busiest"]
    assert_same(found, want)


def test_the_norms_of_dora_on_experts_need_one_device():
    with pytest.raises(UserError, match=r'lora.variant: "dora" on experts is for one device'):
        gradients(OSS, replace(ALL, variant="dora"), {"fsdp": 2})


NUM, WIDTH, INNER = 8, 64, 32
ARROWS = {"up": "embed -> mlp", "gate": "embed -> mlp", "down": "mlp -> embed"}


def adapted(base):
    """Weights with adapters of rank 2, whose bases are stored in a way."""
    draw = np.random.default_rng(0).normal
    w = {}
    for name, arrow in ARROWS.items():
        inputs, outputs = (WIDTH, INNER) if arrow.startswith("embed") else (INNER, WIDTH)
        whole, a, b = (
            jnp.asarray(draw(size=(NUM, *shape)) * 0.2, jnp.float32)
            for shape in ((inputs, outputs), (inputs, 2), (2, outputs))
        )
        param = Param(f"[experts] {arrow}", whole.shape)
        w[name] = Lora(quantize(whole, param, base), a, b)
    return w


def mixed(w, axes, capacity):
    """Outputs, and gradients by tokens and factors."""
    draw = np.random.default_rng(1)
    x = jnp.asarray(draw.normal(size=(8, 8, WIDTH)), jnp.float32)
    ids = jnp.asarray(draw.permuted(np.tile(np.arange(NUM), (64, 1)), axis=1)[:, :3])
    ids, shares = ids.reshape(8, 8, 3).astype(jnp.int32), jnp.full((8, 8, 3), 0.4)
    real = jnp.asarray(draw.random((8, 8)) < 0.9)
    factors = {name: (leaf.a, leaf.b) for name, leaf in w.items()}

    def loss(x, factors):
        bound = {n: replace(w[n], a=a, b=b) for n, (a, b) in factors.items()}
        y, _ = mixture(x, ids, shares, real, bound, Dispatch(NUM, capacity_factor=capacity))
        return jnp.sum(jnp.sin(y)), y

    mesh = make_mesh(dict.fromkeys(AXES, 1) | axes, jax.devices()[: math.prod(axes.values())])
    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, factors))


@pytest.mark.parametrize(
    ("base", "axes", "capacity"),
    [
        ("fp32", {"expert": 2, "context": 2, "tensor": 2}, None),
        ("int4", {"fsdp": 2, "expert": 2, "tensor": 2}, None),
        ("fp32", {"fsdp": 4, "expert": 2}, 8.0),
    ],
)
def test_the_experts_of_a_layer(base, axes, capacity, monkeypatch):
    monkeypatch.setattr(exchange, "TILE", 8)  # several rounds
    w = adapted(base)
    found, want = mixed(w, axes, capacity), mixed(w, {"fsdp": 1}, capacity)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("capacity", [None, 8.0])
def test_every_row_drops_inputs_of_its_own(capacity, monkeypatch):
    """Of equal rows for equal experts on any device, in any round, no two come out alike."""
    monkeypatch.setattr(exchange, "TILE", 8)
    axes = dict.fromkeys(AXES, 1) | {"fsdp": 2, "expert": 2, "tensor": 2}
    a = np.random.default_rng(0).uniform(1, 2, (WIDTH, 2)).astype("f4")
    up = Lora(
        base=jnp.zeros((NUM, WIDTH, WIDTH)), a=jnp.broadcast_to(a, (NUM, WIDTH, 2)),
        b=jnp.ones((NUM, 2, WIDTH)), dropout=jnp.float32(0.5),
        key=jax.random.key_data(jax.random.split(jax.random.key(0), 1)),
    )  # fmt: skip
    w = {"up": up, "down": jnp.ones((NUM, WIDTH, WIDTH))}
    x, shares, real = jnp.ones((8, 8, WIDTH)), jnp.ones((8, 8, 1)), jnp.ones((8, 8), bool)
    ids = jnp.arange(64, dtype=jnp.int32).reshape(8, 8, 1) * 3 % NUM
    with jax.set_mesh(make_mesh(axes, jax.devices()[:8])):
        y, _ = jax.jit(mixture, static_argnums=5)(
            x, ids, shares, real, w, Dispatch(NUM, "gelu_erf", capacity_factor=capacity)
        )
    assert np.unique(np.asarray(y)[:, :, 0]).size == 64
