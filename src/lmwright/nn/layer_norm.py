"""Layer normalization (https://arxiv.org/abs/1607.06450), with or without a scale and a bias, in
float32. Where these have more axes than the last, as those of heads, each has its own.

The backward pass keeps the input and two numbers of each token; the derivative left to itself keeps
three float32 arrays as large as the input.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

Residuals = tuple[Array, Array | None, Array | None, Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Array, scale: Array | None, bias: Array | None, eps: float) -> Array:
    """x [..., D] without its mean, over its standard deviation along D, times scale and plus bias,
    both of the last axes of x: [D], or [N, D] for heads; dtype of x."""
    return _fwd(x, scale, bias, eps)[0]


def _fwd(x: Array, scale: Array | None, bias: Array | None, eps: float) -> tuple[Array, Residuals]:
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(jnp.square(x32 - mean), axis=-1, keepdims=True) + eps)
    y = (x32 - mean) * inverse
    y = y if scale is None else y * scale.astype(jnp.float32)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return y.astype(x.dtype), (x, scale, bias, mean, inverse)


def _bwd(eps: float, residuals: Residuals, g: Array) -> tuple[Array, Array | None, Array | None]:
    x, scale, bias, mean, inverse = residuals
    unit, g32 = (x.astype(jnp.float32) - mean) * inverse, g.astype(jnp.float32)
    pull = g32 if scale is None else g32 * scale.astype(jnp.float32)
    along = jnp.mean(pull * unit, axis=-1, keepdims=True)
    dx = inverse * (pull - jnp.mean(pull, axis=-1, keepdims=True) - unit * along)
    return dx.astype(x.dtype), _summed(g32 * unit, scale), _summed(g32, bias)


def _summed(g: Array, weights: Array | None) -> Array | None:
    """Gradient of the weights of a norm by those of each token."""
    if weights is None:
        return None
    return jnp.sum(g, axis=tuple(range(g.ndim - weights.ndim))).astype(weights.dtype)


layer_norm.defvjp(_fwd, _bwd)
