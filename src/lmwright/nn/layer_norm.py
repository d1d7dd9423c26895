"""Layer normalization (https://arxiv.org/abs/1607.06450), with or without a bias, in float32.

The backward pass keeps the input and two numbers of each token; the derivative left to itself keeps
three float32 arrays as large as the input.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

Residuals = tuple[Array, Array, Array | None, Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Array, scale: Array, bias: Array | None, eps: float) -> Array:
    """x [..., D] without its mean, over its standard deviation along D, times scale [D] and plus
    bias [D]; dtype of x."""
    return _fwd(x, scale, bias, eps)[0]


def _fwd(x: Array, scale: Array, bias: Array | None, eps: float) -> tuple[Array, Residuals]:
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(jnp.square(x32 - mean), axis=-1, keepdims=True) + eps)
    y = (x32 - mean) * inverse * scale.astype(jnp.float32)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return y.astype(x.dtype), (x, scale, bias, mean, inverse)


def _bwd(eps: float, residuals: Residuals, g: Array) -> tuple[Array, Array, Array | None]:
    x, scale, bias, mean, inverse = residuals
    unit, g32 = (x.astype(jnp.float32) - mean) * inverse, g.astype(jnp.float32)
    tokens = tuple(range(x.ndim - 1))
    pull = g32 * scale.astype(jnp.float32)
    along = jnp.mean(pull * unit, axis=-1, keepdims=True)
    dx = inverse * (pull - jnp.mean(pull, axis=-1, keepdims=True) - unit * along)
    dscale = jnp.sum(g32 * unit, axis=tokens).astype(scale.dtype)
    dbias = None if bias is None else jnp.sum(g32, axis=tokens).astype(bias.dtype)
    return dx.astype(x.dtype), dscale, dbias


layer_norm.defvjp(_fwd, _bwd)
