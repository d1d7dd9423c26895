"""Rotary position embedding (https://arxiv.org/abs/2104.09864), halves rotated as in
Hugging Face: pairs are (i, i + H/2)."""

import jax.numpy as jnp
from jax import Array, lax


def rope_tables(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """cos and sin, float32 [B, T, H/2], for int positions [B, T]."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions[..., None].astype(jnp.float32) * (1.0 / theta**exponent)
    # computed once: without the barrier, each layer's loop would take the cosines again
    return lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def apply_rope(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotates x [B, T, N, H] by the tables; the arithmetic is float32."""
    cos, sin = (table[:, :, None, :] for table in tables)  # [B, T, 1, H/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
