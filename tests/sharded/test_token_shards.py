"""Loops over chunks of tokens: each device sums gradients of weights over its own tokens, and they
are added up over devices after the loop."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from lmwright.core.sharding import AXES, WEIGHTS, TokenShards, make_mesh, partition
from lmwright.kernels.mlp_chunks import by_chunks
from lmwright.models.block import MLP_WEIGHTS, _feed_forward
from lmwright.nn.xent import chunked_xent

B, T, D, V, F = 8, 64, 16, 128, 48
MESHES = [
    {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 4},
    {"data": 2, "context": 2, "tensor": 2}, {"tensor": 8},
]  # fmt: skip


def arrays(rng, *shapes):
    return [jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for shape in shapes]


def logits(w, x):
    return jnp.einsum("btd,vd->btv", x, w["embed"], preferred_element_type=jnp.float32)


def loss(w, x, targets, weights, chunk, sum_once=True):
    options = {"chunk": chunk, "sum_once": sum_once, "z_loss": 1e-3}
    return chunked_xent(logits, w, x, targets, weights, **options).total


def whole_loss(w, x, targets, weights):
    """The same without chunks."""
    wide = logits(w, x)
    log_z = jax.nn.logsumexp(wide, axis=-1)
    chosen = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]
    return jnp.sum((log_z - chosen + 1e-3 * log_z**2) * weights)


def mlp(w, h, chunk):
    out = by_chunks(partial(_feed_forward, "swiglu"), MLP_WEIGHTS, w, h, chunk)
    return jnp.sum(jnp.sin(out) ** 2)


def whole_mlp(w, h):
    gate, up = (jnp.einsum("btd,df->btf", h, w[name]) for name in ("gate", "up"))
    out = jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, w["down"])
    return jnp.sum(jnp.sin(out) ** 2)


def problem(kind):
    """Function of (weights, activations, chunk), its twin without chunks, weights with their axes,
    and activations."""
    rng = np.random.default_rng(0)
    if kind == "loss":
        table, x = arrays(rng, (V, D), (B, T, D))
        targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
        weights = jnp.asarray(rng.integers(0, 2, (B, T)), jnp.float32)
        fn = lambda w, x, chunk: loss(w, x, targets, weights, chunk)  # noqa: E731
        whole = lambda w, x: whole_loss(w, x, targets, weights)  # noqa: E731
        return fn, whole, {"embed": table}, {"embed": "vocab embed"}, x
    gate, up, down, h = arrays(rng, (D, F), (D, F), (F, D), (B, T, D))
    return mlp, whole_mlp, {"gate": gate, "up": up, "down": down}, MLP_WEIGHTS, h


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("kind, chunk", [("loss", 4), ("loss", 16), ("mlp", 8)])
def test_gradients_equal_those_of_the_whole(kind, chunk, sizes):
    fn, whole, w, axes, x = problem(kind)
    mesh = make_mesh(dict.fromkeys(AXES, 1) | sizes, jax.devices()[:8])
    held = {name: NamedSharding(mesh, partition(tuple(axes[name].split()), WEIGHTS)) for name in w}
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(partial(fn, chunk=chunk), argnums=(0, 1)),
                       out_shardings=(None, (held, None)))  # fmt: skip
        compiled = step.lower(jax.device_put(w, held), x).compile()
        ours = compiled(jax.device_put(w, held), x)
    theirs = jax.value_and_grad(whole, argnums=(0, 1))(w, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()),
        jax.tree.map(np.asarray, ours), theirs,
    )  # fmt: skip
    if sizes.get("tensor", 1) == 1:
        assert not reduced_in_loops(compiled.as_text(), min(a.size for a in w.values()))


def reduced_in_loops(text, size):
    """Sums over devices of at least `size` values in the bodies of loops."""
    bodies = set(re.findall(r"body=%([\w.\-]+)", text))
    sums = []
    for name, body in re.findall(r"^%([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S):
        for shape, kind in re.findall(
            r"= \(?f32\[([\d,]+)\][^=]* (all-reduce|reduce-scatter)\(", body
        ):
            parts = 8 if kind == "reduce-scatter" else 1
            if name in bodies and np.prod([int(n) for n in shape.split(",")]) * parts >= size:
                sums.append((name, shape))
    return sums


def test_a_sum_in_a_loop_is_found():
    *_, w, _, x = problem("loss")
    targets, weights = jnp.zeros((B, T), jnp.int32), jnp.ones((B, T), jnp.float32)
    fn = lambda w, x: loss(w, x, targets, weights, 16, sum_once=False)  # noqa: E731
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"fsdp": 8}, jax.devices()[:8])
    held = {"embed": NamedSharding(mesh, partition(("vocab", "embed"), WEIGHTS))}
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(fn), out_shardings=held)
        text = step.lower(jax.device_put(w, held), x).compile().as_text()
    assert reduced_in_loops(text, V * D)


def test_shards_are_split_and_joined():
    x = jnp.arange(B * T).reshape(B, T)
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"fsdp": 2, "context": 4}, jax.devices()[:8])
    with jax.set_mesh(mesh):
        shards = TokenShards.of(x)
        parts = jax.jit(shards.split)(x)
        assert parts.shape == (8, B // 2, T // 4)
        np.testing.assert_array_equal(parts[1], x[: B // 2, T // 4 : T // 2])
        np.testing.assert_array_equal(jax.jit(shards.join)(parts), x)
    assert TokenShards.of(x).count == 1


@pytest.mark.parametrize("sum_once", [False, True])
def test_any_number_of_tokens_over_devices_that_share_rows(sum_once):
    """As masked language modeling picks them: 13 of a row, on four devices."""
    *_, w, _, x = problem("loss")
    rng = np.random.default_rng(1)
    x, targets = x[:, :13], jnp.asarray(rng.integers(0, V, (B, 13)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 2, (B, 13)), jnp.float32)
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"fsdp": 2, "context": 4}, jax.devices()[:8])
    ours = lambda w, x: loss(w, x, targets, weights, 8, sum_once)  # noqa: E731
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(w, x)
    theirs = jax.value_and_grad(whole_loss, argnums=(0, 1))(w, x, targets, weights)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()),
        jax.tree.map(np.asarray, found), theirs,
    )  # fmt: skip
