"""Block inputs in fewer bits: how close they are, what they take, and that gradients are those of a
block computed again from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import FORMATS, Remat, remat_of
from lmwright.core.saves import OUTLIERS
from lmwright.core.stack import run_stack
from lmwright.core.weight import name_result

B, T, D, L = 2, 24, 128, 3
NAMES = sorted(FORMATS)


def stream(seed=0):
    """Like a residual stream: channels of different sizes, two of them far out in a few tokens."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, T, D)) * np.exp(rng.normal(size=D))
    x[:, 0, [5, 77]] *= 300
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, largest", [("int12", 2047), ("int8", 127)])
def test_values_are_within_half_a_step(name, largest, dtype):
    """By numpy in float64: half a step of the largest of 64 neighbors; a scale is rounded up by
    less than a hundredth."""
    format, x = FORMATS[name], stream().astype(dtype)
    wide = np.asarray(x, np.float64)
    packed = jax.jit(format.pack)(x)  # by a compiler, which may keep more than is asked for
    back = np.asarray(jax.jit(format.unpack)(packed), np.float64)
    rest, error = wide.copy(), np.abs(back - wide)
    if name == "int8":
        order = np.argsort(np.abs(wide).max(axis=1), axis=-1)[:, -OUTLIERS:]
        for row, channels in enumerate(order):
            np.testing.assert_allclose(  # in bfloat16
                back[row][:, channels], wide[row][:, channels], rtol=2**-8
            )
            rest[row][:, channels] = 0
            error[row][:, channels] = 0
    peak = np.abs(rest).reshape(B, T, -1, 64).max(axis=-1, keepdims=True)
    half = np.broadcast_to(peak / largest / 2, (B, T, D // 64, 64)).reshape(wide.shape)
    assert (error <= 1.01 * half + 1e-30).all()
    assert (error > 0.4 * half).any()  # the bound is not a loose one


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_takes_the_bits_that_are_said(name):
    packed = FORMATS[name].pack(stream())
    bits = 8 * sum(a.size * a.dtype.itemsize for a in packed) / (B * T * D)
    assert bits == pytest.approx(FORMATS[name].bits(T, D))
    assert bits < {"int12": 12.3, "int8": 9.5}[name]


def test_twelve_bits_hold_every_integer():
    """A group with the largest integer has a known scale; two values share three bytes."""
    x = np.random.default_rng(1).integers(-2000, 2001, (1, 50, 64)).astype(np.float32)
    x[..., 0], x[..., 63] = 2032, -2032  # 2,032 (1 + 2^-8) / 2,047 is 0.9966, in bfloat16 0.9961
    back = np.asarray(FORMATS["int12"].unpack(FORMATS["int12"].pack(jnp.asarray(x))))
    assert np.abs(back - x).max() <= 0.5
    assert len(np.unique(np.sign(back))) == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_compiler_rounds_the_scale_before_it_divides(name):
    """A cast to bfloat16 and back is left out of large programs, which doubles the error of 12
    bits; this is not."""
    text = jax.jit(FORMATS[name].pack).lower(stream()).as_text()
    assert "reduce_precision" in text and "format = e8m7" in text


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name):
    format = FORMATS[name]
    assert not np.asarray(format.unpack(format.pack(jnp.zeros((1, 4, 64))))).any()


def block(w, x, shift):
    """A block with a matmul that some policies keep."""
    h = name_result(jnp.einsum("btd,de->bte", x, w["in"]))
    return x + jnp.einsum("bte,ed->btd", jnp.tanh(h) + shift, w["out"]), {"sum": jnp.sum(h)}


def weights():
    rng = np.random.default_rng(2)
    return {
        "in": jnp.asarray(rng.normal(size=(L, D, 40)) * 0.02, jnp.float32),
        "out": jnp.asarray(rng.normal(size=(L, 40, D)) * 0.1, jnp.float32),
    }


def run(w, x, remat, unroll):
    """Loss of the stack."""
    out, aux = run_stack([block], w, x, jnp.ones((B, T, 1)), remat=remat, unroll=unroll)
    return jnp.mean(jnp.sin(out)) + 1e-3 * aux["sum"]


def by_hand(w, x, format):
    """The gradients layer by layer, each computed again from what the format keeps."""
    inputs, side = [], jnp.ones((B, T, 1))
    for i in range(L):
        inputs.append(x)
        x = block(jax.tree.map(lambda a: a[i], w), x, side)[0]  # noqa: B023
    g, grads = jax.grad(lambda out: jnp.mean(jnp.sin(out)))(x), []
    for i in reversed(range(L)):
        layer, kept = jax.tree.map(lambda a: a[i], w), format.unpack(format.pack(inputs[i]))  # noqa: B023
        pull_back = jax.vjp(lambda w, x: block(w, x, side), layer, kept)[1]
        dw, g = pull_back((g, {"sum": jnp.float32(1e-3)}))
        grads.insert(0, dw)
    return jax.tree.map(lambda *a: jnp.stack(a), *grads), g


@pytest.mark.parametrize("offload", ["none", "block_inputs"])
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_a_block_computed_again(name, unroll, offload):
    w, x = weights(), stream()
    take = jax.jit(jax.value_and_grad(run, argnums=(0, 1)), static_argnums=(2, 3))
    loss, grads = take(w, x, remat_of("block", offload, name), unroll)
    exact, exact_grads = take(w, x, remat_of("block"), unroll)
    np.testing.assert_array_equal(loss, exact)  # the forward pass is not changed
    for ours, wanted in zip(
        *map(jax.tree.leaves, (grads, by_hand(w, x, FORMATS[name]))), strict=True
    ):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    moved = [
        np.abs(a - b).max()
        for a, b in zip(*map(jax.tree.leaves, (grads, exact_grads)), strict=True)
    ]
    assert max(moved) > 0


def test_what_a_policy_keeps_is_read_and_exact():
    """With the first matmul kept, the gradient of the second weight, which needs nothing else, is
    that of exact saves; that of the first weight is not."""
    w, x = weights(), stream()
    kept = frozenset({"dot"})
    take = jax.jit(jax.grad(run), static_argnums=(2, 3))
    ours = take(w, x, Remat(kept, format=FORMATS["int8"]), False)
    exact = take(w, x, Remat(kept), False)
    np.testing.assert_array_equal(ours["out"], exact["out"])
    assert np.abs(ours["in"] - exact["in"]).max() > 0


@pytest.mark.parametrize(
    "name, bits", [("int12", 12.25), ("int8", 8.25 + 1 + OUTLIERS * 32 / T / D)]
)
def test_a_loop_keeps_nothing_else(name, bits):
    """Residuals of the scan: what is packed, and neither the stream nor copies of weights."""
    w, x = weights(), stream()
    _, pull_back = jax.vjp(lambda w, x: run(w, x, remat_of("block", "none", name), False), w, x)
    kept = [a for a in jax.tree.leaves(pull_back) if getattr(a, "ndim", 0) > 1 and a.shape[0] == L]
    sizes = [
        a.size * a.dtype.itemsize for a in kept if a.shape not in {v.shape for v in w.values()}
    ]
    assert 8 * sum(sizes) / (L * B * T * D) == pytest.approx(bits)
