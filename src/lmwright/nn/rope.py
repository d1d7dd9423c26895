"""Rotary position embedding (https://arxiv.org/abs/2104.09864), halves rotated as in
Hugging Face: pairs are (i, i + H/2)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lmwright.nn.rope_scaling import RopeScaling, rotations


def rope_tables(
    positions: Array,
    rotary_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    *,
    length: int | None = None,
) -> tuple[Array, Array]:
    """cos and sin, float32 [B, T, R/2], for int positions [B, T]; R is `rotary_dim`, what is
    rotated of a head.

    `length` is that of the rows for scalings that depend on it, T if it is not given; some
    scalings also make the rotated vectors longer, which the tables contain.
    """
    turns, longer = rotations(rotary_dim, theta, scaling, length or positions.shape[1])
    angles = positions[..., None].astype(jnp.float32) * turns
    # computed once: without the barrier, each layer's loop would take the cosines again
    return lax.optimization_barrier((jnp.cos(angles) * longer, jnp.sin(angles) * longer))


def apply_rope(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotates the first R of the H dims of x [B, T, N, H] by tables [B, T, R/2]; the arithmetic
    is float32."""
    rotary_dim = 2 * tables[0].shape[-1]
    if rotary_dim == x.shape[-1]:
        return _rotated(x, tables)
    first, rest = jnp.split(x, [rotary_dim], axis=-1)
    return jnp.concatenate([_rotated(first, tables), rest], axis=-1)


@jax.custom_vjp
def _rotated(x: Array, tables: tuple[Array, Array]) -> Array:
    """Its gradient is the rotation back, which needs nothing of the forward pass."""
    cos, sin = (table[:, :, None, :] for table in tables)  # [B, T, 1, H/2]
    return lax.platform_dependent(x, cos, sin, tpu=_by_product, default=_by_halves)


def _by_halves(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _by_product(x: Array, cos: Array, sin: Array) -> Array:
    """Rotation with the halves swapped by a permutation matrix, which is exact: half a head leaves
    most vector lanes of a TPU empty."""
    head_dim = x.shape[-1]
    swap = jnp.asarray(np.roll(np.eye(head_dim), head_dim // 2, axis=0), x.dtype)
    whole = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # TPUs would round it
    swapped = jnp.einsum(
        "btnh,hg->btng", x, swap, precision=whole, preferred_element_type=jnp.float32
    )
    both = lambda a, b: jnp.concatenate([a, b], axis=-1)  # noqa: E731
    return (x.astype(jnp.float32) * both(cos, cos) + swapped * both(-sin, sin)).astype(x.dtype)


def _rope_fwd(x: Array, tables: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
    return _rotated(x, tables), tables


def _rope_bwd(tables: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    cos, sin = tables
    return _rotated(g, (cos, -sin)), None  # positions are integers: tables have no gradient


_rotated.defvjp(_rope_fwd, _rope_bwd)
