"""Layer normalization (https://arxiv.org/abs/1607.06450), with or without a bias, in float32."""

import jax.numpy as jnp
from jax import Array, lax


def layer_norm(x: Array, scale: Array, bias: Array | None, eps: float) -> Array:
    """x [..., D] without its mean, over its standard deviation along D, times scale [D] and plus
    bias [D]; dtype of x."""
    x32 = x.astype(jnp.float32)
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + eps)
    y = centered * inverse * scale.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
