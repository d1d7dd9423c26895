"""Grids bit for bit as the gguf package and torch compute them, gradients that stop where a value
is clipped, and adapters inside the rounding."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.leaves import Lora, Rounded
from lmwright.core.ragged import dot_ragged
from lmwright.core.rounded import first_scale, stored, widened
from lmwright.core.rounding import int8_shifted
from lmwright.core.weight import dot

GROUPS = {"int4": 16, "int8": 0, "q4_0": 32}


def weight(seed=0):
    """[inputs 64, outputs 24] with a block of zeros and ties."""
    w = np.random.default_rng(seed).standard_normal((64, 24)).astype("f4")
    w[:32, 3] = 0
    w[32:, 5] = np.float32(0.5) * np.sign(w[32:, 5])
    return w


def leaf(latent, grid, scale=None, activations="none"):
    return Rounded(latent, scale, grid, GROUPS[grid], activations, inputs=1, outputs=1)


def torch_values(w, group, low, high):
    """torchao's symmetric scheme, of [out, in]: its scale, its reciprocal, its gradient mask."""
    torch = pytest.importorskip("torch", reason="torch is the reference")
    blocks = torch.tensor(w.T.copy()).reshape(24, -1, group or 64)
    scale = blocks.abs().amax(-1, keepdim=True) / ((high - low) / 2)
    scale = scale.clamp(min=torch.finfo(torch.float32).eps)
    codes = torch.round(blocks * (1.0 / scale))
    inside = (codes >= low) & (codes <= high)
    values = codes.clamp(low, high) * scale
    return values.reshape(24, 64).numpy().T, inside.reshape(24, 64).numpy().T


@pytest.mark.parametrize("grid, low, high", [("int4", -8, 7), ("int8", -128, 127)])
def test_integers_are_those_of_torch(grid, low, high):
    w = weight()
    found, pull = jax.vjp(lambda w: widened(leaf(w, grid)), jnp.asarray(w))
    values, inside = torch_values(w, GROUPS[grid], low, high)
    np.testing.assert_array_equal(found, values)
    g = np.random.default_rng(1).standard_normal(w.shape).astype("f4")
    np.testing.assert_array_equal(pull(jnp.asarray(g))[0], np.where(inside, g, 0))
    assert not inside.all()


@pytest.mark.parametrize("grid", GROUPS)
def test_the_last_bit_decides_on_the_largest_value_alone(grid):
    """As docs/qat.md says: it is halfway between two codes, and not at all in Q4_0."""
    w = np.random.default_rng(0).standard_normal((64, 24)).astype("f4")
    before, after = (stored(leaf(jnp.asarray(a), grid))[0] for a in (w, w * np.float32(1 + 2**-22)))
    blocks = np.abs(w).reshape(64 // (GROUPS[grid] or 64), -1, 24)
    largest = (blocks == blocks.max(axis=1, keepdims=True)).reshape(w.shape)
    changed = np.asarray(before != after)
    assert not changed[~largest].any()
    assert changed.any() == (grid != "q4_0")


def test_q4_0_is_that_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q4_0
    w = weight()
    expected = gguf.dequantize(gguf.quantize(w.T.copy(), kind), kind).T
    found = np.asarray(widened(leaf(jnp.asarray(w), "q4_0")))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(widened(leaf(jnp.asarray(found), "q4_0")), found)


def test_activations_are_those_of_torch():
    torch = pytest.importorskip("torch", reason="torch is the reference")
    x = np.random.default_rng(0).standard_normal((5, 40)).astype("f4") + 0.3
    x[2] = np.abs(x[2])
    t = torch.tensor(x)
    low, high = t.amin(-1, keepdim=True).clamp(max=0), t.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = -128 - torch.round(low / scale)
    codes = torch.clamp(torch.round(t * (1.0 / scale)) + zero, -128, 127)
    np.testing.assert_array_equal(int8_shifted(jnp.asarray(x), (1,)), (codes - zero) * scale)


@pytest.mark.parametrize("grid", GROUPS)
def test_codes_times_scales_are_the_values(grid):
    w = jnp.asarray(weight())
    codes, scale = (np.asarray(a) for a in stored(leaf(w, grid)))
    group = GROUPS[grid] or 64
    assert codes.dtype == np.int8 and scale.shape == (64 // group, 24)
    np.testing.assert_array_equal(codes * np.repeat(scale, group, 0), widened(leaf(w, grid)))


@pytest.mark.parametrize("grid", GROUPS)
def test_an_adapter_inside_the_rounding(grid):
    """Starts as the rounded base, is what its codes and scales say, and both learn."""
    rng, w = np.random.default_rng(1), jnp.asarray(weight())
    a = jnp.asarray(rng.standard_normal((64, 4)), "f4")
    b = jnp.asarray(rng.standard_normal((4, 24)), "f4")
    start = first_scale(w, leaf(None, grid))
    made = lambda b, scale: leaf(Lora(w, a, b, inputs=1, outputs=1), grid, scale)  # noqa: E731
    np.testing.assert_array_equal(widened(made(0 * b, start)), widened(leaf(w, grid)))
    moved = start * 1.07
    values = np.asarray(widened(made(b, moved)))
    codes, scale = (np.asarray(each) for each in stored(made(b, moved)))
    group = GROUPS[grid] or 64
    np.testing.assert_array_equal(codes * np.repeat(scale, group, 0), values)
    if grid == "q4_0":
        np.testing.assert_array_equal(scale, scale.astype("f2"))
    assert np.abs(codes).max() <= (128 if grid == "int8" else 8)
    pull = rng.standard_normal(w.shape).astype("f4")
    db, ds = jax.grad(lambda b, s: jnp.sum(widened(made(b, s)) * pull), (0, 1))(b, moved)
    assert np.isfinite(db).all() and np.abs(db).max() > 0
    used = np.abs(codes).reshape(-1, group, 24).max(1) > 0
    assert (np.asarray(ds)[used] != 0).all()


@pytest.mark.parametrize("activations", ["none", "int8"])
def test_a_product_is_that_of_the_values(activations):
    w = jnp.asarray(weight())
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 3, 64)), "f4")
    held = leaf(w, "int4", activations=activations)
    met = int8_shifted(x, (2,)) if activations == "int8" else x

    def ours(x, w):
        return jnp.sum(jnp.sin(dot("btd,df->btf", x, leaf(w, "int4", activations=activations))))

    found = jax.jit(lambda: dot("btd,df->btf", x, held))()
    np.testing.assert_allclose(found, met @ widened(held), rtol=1e-5, atol=1e-5)
    dx, dw = jax.grad(ours, (0, 1))(x, w)
    g = jnp.cos(met @ widened(held))
    np.testing.assert_allclose(dx, g @ widened(held).T, rtol=1e-4, atol=1e-4)
    assert np.isfinite(dw).all() and np.abs(dw).max() > 0


def experts(activations="none"):
    """(weight of 3 experts, the leaf of it)."""
    w = np.stack([weight(seed) for seed in range(3)])
    return w, Rounded(jnp.asarray(w), None, "int4", 16, activations, inputs=1, outputs=1)


@pytest.mark.parametrize("activations", ["none", "int8"])
def test_rows_meet_the_rounded_matrix_of_their_expert(activations):
    """Values and gradients of ragged products, each expert's as torch computes it alone."""
    w, held = experts(activations)
    found = [torch_values(matrix, 16, -8, 7) for matrix in w]
    values, inside = (np.stack(each) for each in zip(*found, strict=True))
    rng, sizes = np.random.default_rng(3), np.array([5, 0, 6])
    x, g = rng.standard_normal((11, 64)).astype("f4"), rng.standard_normal((11, 24)).astype("f4")
    read = np.asarray(int8_shifted(jnp.asarray(x), (1,))) if activations == "int8" else x
    owner = np.repeat(np.arange(3), sizes)

    def ours(x, latent):
        return dot_ragged("td,edf->tf", x, replace(held, latent=latent), jnp.asarray(sizes))

    y, pull = jax.vjp(ours, jnp.asarray(x), held.latent)
    dx, dw = pull(jnp.asarray(g))
    wide = values.astype("f8")
    np.testing.assert_allclose(y, np.einsum("td,tdf->tf", read, wide[owner]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("tf,tdf->td", g, wide[owner]), rtol=1e-5, atol=1e-5)
    for expert in range(3):
        rows = owner == expert
        want = (read[rows].astype("f8").T @ g[rows]) * inside[expert]
        np.testing.assert_allclose(dw[expert], want, rtol=1e-5, atol=1e-5)


def test_inputs_of_each_expert_have_a_scale_of_their_own():
    """Also in a product that is summed over experts, as that of reasoning layers."""
    held = experts("int8")[1]
    x = np.random.default_rng(4).standard_normal((2, 5, 3, 64)).astype("f4")
    x *= np.array([1, 10, 100], "f4")[:, None]
    read = np.asarray(int8_shifted(jnp.asarray(x), (3,)))
    found = dot("btef,efd->btd", jnp.asarray(x), held)
    wide = np.asarray(widened(held)).astype("f8")
    np.testing.assert_allclose(found, np.einsum("btef,efd->btd", read, wide), rtol=1e-5, atol=1e-3)
