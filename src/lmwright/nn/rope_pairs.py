"""Rotary position embedding of neighboring dims, as DeepSeek has them: pairs are (2 i, 2 i + 1).
The angles are those of `nn.rope`."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def of_pairs(tables: tuple[Array, Array]) -> tuple[Array, Array]:
    """cos, and sin with the sign that each dim has it with, [B, T, R], of tables [B, T, R/2]."""
    cos, sin = tables
    both = jnp.stack([-sin, sin], axis=-1).reshape(*sin.shape[:-1], -1)
    return jnp.repeat(cos, 2, axis=-1), both


def turn_pairs(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotates x [B, T, N, R] by tables of `of_pairs`; the arithmetic is float32. The dims of a pair
    are swapped by a permutation matrix, which is exact."""
    cos, sin = (table[:, :, None, :] for table in tables)  # [B, T, 1, R]
    size = x.shape[-1]
    swap = jnp.asarray(np.eye(size)[np.arange(size) ^ 1], x.dtype)
    whole = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # TPUs would round it
    swapped = jnp.einsum(
        "btnh,hg->btng", x, swap, precision=whole, preferred_element_type=jnp.float32
    )
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)
