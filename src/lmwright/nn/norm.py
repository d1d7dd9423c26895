"""Root mean square normalization (https://arxiv.org/abs/1910.07467), in float32."""

import jax.numpy as jnp
from jax import Array, lax

from lmwright.config.registry import Registry

FOR_ALL = Registry(__package__, {"*": "for_all.times", "+": "for_all.plus"})


def rms_norm(x: Array, scale: Array, eps: float, *, dims: int = 1) -> Array:
    """x over its root mean square along the last `dims` axes, times scale; dtype of x."""
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x32), axis=tuple(range(-dims, 0)), keepdims=True)
    return FOR_ALL["*"]((x32 * lax.rsqrt(mean + eps)).astype(x.dtype), scale)


def rms_norm_from_zero(x: Array, scale: Array, eps: float) -> Array:
    """RMS norm whose weights are zero where they change nothing, as Gemma stores them."""
    x32 = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
