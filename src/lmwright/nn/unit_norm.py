"""RMS norm without weights: vectors at a root mean square of 1."""

import jax.numpy as jnp
from jax import Array, lax


def unit_norm(x: Array, eps: float) -> Array:
    """x over its root mean square along the last axis, in float32; dtype of x."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * lax.rsqrt(mean + eps)).astype(x.dtype)
