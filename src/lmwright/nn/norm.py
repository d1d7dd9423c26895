"""Root mean square normalization (https://arxiv.org/abs/1910.07467), in float32."""

import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, scale: Array, eps: float, *, dims: int = 1) -> Array:
    """x over its root mean square along the last `dims` axes, times scale; dtype of x."""
    x32 = x.astype(jnp.float32)
    over = tuple(range(-dims, 0))
    inverse = lax.rsqrt(jnp.mean(jnp.square(x32), axis=over, keepdims=True) + eps)
    return (x32 * inverse).astype(x.dtype) * scale.astype(x.dtype)


def rms_norm_from_zero(x: Array, scale: Array, eps: float) -> Array:
    """RMS norm whose weights are zero where they change nothing, as Gemma stores them."""
    x32 = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
