"""Products in 8-bit floats, beside the same products of torch's 8-bit floats in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lmwright.core import float8
from lmwright.core.leaves import Float8, dequantize, trained_leaves
from lmwright.core.weight import dot

EQUATIONS = {  # shapes of activations and weight
    "btd,df->btf": ((2, 5, 32), (32, 48)),
    "btd,dnh->btnh": ((2, 5, 32), (32, 4, 16)),
    "btnh,nhd->btd": ((2, 5, 4, 16), (4, 16, 32)),
}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(a, dtype):
    """float64 values that an array has in 8 bits, by torch's rounding."""
    factor = np.float32(np.abs(a).max()) / np.float32(LARGEST[dtype])
    values = torch.from_numpy(a.astype(np.float32) / factor).to(dtype)
    return values.to(torch.float64).numpy() * np.float64(factor)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("eqn", EQUATIONS)
def test_a_product_and_its_gradients(eqn, dtype):
    dice = np.random.default_rng(0)
    draw = lambda shape, size: jnp.asarray(dice.standard_normal(shape) * size)  # noqa: E731
    x, w = (draw(shape, size) for shape, size in zip(EQUATIONS[eqn], (3.0, 0.02), strict=True))
    x, w = x.astype(dtype), w.astype(jnp.float32)
    y, back = jax.jit(partial(jax.vjp, lambda x, w: dot(eqn, x, Float8(w))))(x, w)
    g = draw(y.shape, 1e-6).astype(dtype)
    dx, dw = back(g)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    e4 = [rounded(np.asarray(a, np.float32), torch.float8_e4m3fn) for a in (x, w)]
    e5 = rounded(np.asarray(g, np.float32), torch.float8_e5m2)
    sides, out = eqn.split("->")
    of_x, of_w = sides.split(",")
    exact = (
        np.einsum(eqn, *e4),
        np.einsum(f"{out},{of_w}->{of_x}", e5, e4[1]),
        np.einsum(f"{of_x},{out}->{of_w}", e4[0], e5),
    )
    share = 1e-6 if dtype == jnp.float32 else 2**-8
    for got, wanted, error in zip((y, dx, dw), exact, (share, share, 1e-6), strict=True):
        assert np.abs(np.asarray(got, np.float64) - wanted).max() < error * np.abs(wanted).max()


def test_the_error_of_rounding_is_that_of_three_bits():
    """So the test above compares numbers that differ from the exact product."""
    dice = np.random.default_rng(1)
    x, w = (jnp.asarray(dice.standard_normal(s), jnp.float32) for s in ((64, 256), (256, 64)))
    y, exact = float8.product("td,df->tf", x, Float8(w)), x @ w
    error = jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)
    assert 0.01 < error < 0.06


def test_zeros_give_zeros():
    x, w = jnp.zeros((2, 3, 16)), jnp.ones((16, 16))
    y, back = jax.vjp(lambda x, w: dot("btd,df->btf", x, Float8(w)), x, w)
    assert not any(jnp.any(a) for a in (y, *back(jnp.zeros_like(y))))


def test_what_no_factor_can_scale_gives_zeros():
    """Gradients of a saturated loss may be the smallest floats; their factor would be zero."""
    x, w = jnp.ones((2, 3, 16)), jnp.ones((16, 16))
    y, back = jax.vjp(lambda x, w: dot("btd,df->btf", x, Float8(w)), x, w)
    for size in (1e-35, 1e-30):
        dx, dw = back(jnp.full_like(y, size))
        assert jnp.all(jnp.isfinite(dx)) and jnp.all(jnp.isfinite(dw))
        assert bool(jnp.all(dx > 0)) == (size == 1e-30)


def test_the_weight_is_a_trained_float():
    leaf = Float8(jnp.full((2, 2), 0.3))
    assert trained_leaves({"w": leaf}) == [True]
    np.testing.assert_array_equal(dequantize(leaf, jnp.float32), leaf.latent)
