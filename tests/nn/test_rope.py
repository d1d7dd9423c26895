"""Rotary positions: both ways to compute them, and the gradient, against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.nn import rope

THETA = 5000.0


def rotated_by_transformers(x, positions):
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    dim = x.shape[-1]
    inverse = 1.0 / THETA ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.tensor(np.asarray(positions))[..., None] * inverse
    angles = torch.cat([angles, angles], dim=-1)
    heads_first = torch.tensor(np.asarray(x, np.float64)).transpose(1, 2)
    out, _ = apply_rotary_pos_emb(heads_first, heads_first, angles.cos(), angles.sin())
    return out.transpose(1, 2).numpy()


@pytest.fixture
def problem():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((2, 7, 3, 12)), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 900, (2, 7)), jnp.int32)
    return x, positions


@pytest.mark.parametrize("way", [rope._by_halves, rope._by_product])
def test_equals_transformers(problem, way):
    x, positions = problem
    cos, sin = (t[:, :, None, :] for t in rope.rope_tables(positions, 12, THETA))
    np.testing.assert_allclose(
        way(x, cos, sin), rotated_by_transformers(x, positions), rtol=1e-4, atol=1e-4
    )


def test_the_product_moves_bfloat16_exactly(problem):
    x, positions = problem
    cos, sin = (t[:, :, None, :] for t in rope.rope_tables(positions, 12, THETA))
    low = x.astype(jnp.bfloat16)
    halves, product = (jax.jit(f)(low, cos, sin) for f in (rope._by_halves, rope._by_product))
    np.testing.assert_allclose(
        halves.astype(np.float32), product.astype(np.float32), rtol=2**-7, atol=1e-6
    )


def test_float32_is_not_rounded_by_the_product_on_a_tpu(problem):
    x, positions = problem
    cos, sin = (t[:, :, None, :] for t in rope.rope_tables(positions, 12, THETA))
    product = jax.jit(rope._by_product).lower(x, cos, sin).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in product


def test_the_gradient_is_the_derivative(problem):
    x, positions = problem
    tables = rope.rope_tables(positions, 12, THETA)
    plain = lambda x: rope._by_halves(x, *(t[:, :, None, :] for t in tables))  # noqa: E731
    g = jnp.cos(x * 3)
    (got,) = jax.vjp(lambda x: rope.apply_rope(x, tables), x)[1](g)
    (want,) = jax.vjp(plain, x)[1](g)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
