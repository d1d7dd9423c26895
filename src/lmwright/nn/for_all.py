"""Scales and biases that all tokens read, with gradients that are sums in their own dtype.

Left to itself, XLA adds up bfloat16 as it is on CPUs and on GPUs from Hopper on, which leaves two
digits of a sum over many tokens; TPUs add it up in float32.
"""

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.sharding import platform


def times(x: Array, scale: Array) -> Array:
    """x times the scale of its last axes; dtype of x."""
    if platform() == "tpu" or scale.dtype == x.dtype:
        return x * scale.astype(x.dtype)
    return _times(x, scale)


def plus(x: Array, bias: Array) -> Array:
    """x plus the bias of its last axes; dtype of x."""
    if platform() == "tpu" or bias.dtype == x.dtype:
        return x + bias.astype(x.dtype)
    return _plus(x, bias)


@jax.custom_vjp
def _times(x: Array, scale: Array) -> Array:
    return x * scale.astype(x.dtype)


@jax.custom_vjp
def _plus(x: Array, bias: Array) -> Array:
    return x + bias.astype(x.dtype)


def _times_bwd(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, scale = residuals
    change = g.astype(jnp.float32) * x.astype(jnp.float32)
    return g * scale.astype(g.dtype), _summed(change, scale)


def _summed(g: Array, w: Array) -> Array:
    """Sum over the axes that a weight does not have, in float32."""
    over = tuple(range(g.ndim - w.ndim))
    return jnp.sum(g.astype(jnp.float32), axis=over).astype(w.dtype)


_times.defvjp(lambda x, scale: (_times(x, scale), (x, scale)), _times_bwd)
_plus.defvjp(lambda x, bias: (_plus(x, bias), bias), lambda bias, g: (g, _summed(g, bias)))
