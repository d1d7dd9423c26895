"""Grids that weights and activations are rounded to, each with its published formula.

ternary      s = mean |w| of a matrix, codes -1, 0, 1          https://arxiv.org/abs/2402.17764
int8_tokens  a = 127 / max |x| of a token, codes -128 ... 127  the same
"""

import jax.numpy as jnp
from jax import Array

from lmwright.core.sharding import by_platform

LEAST = 1e-5  # of a mean or largest magnitude
GROUP = 256  # values of a sum


def ternary(w: Array, dims: int) -> tuple[Array, Array]:
    """int8 codes of `w`, and the float32 scale of each matrix, which has the last `dims` axes."""
    w = w.astype(jnp.float32)
    axes = tuple(range(-dims, 0))
    # as transformers has it: what is rounded is multiplied by the inverse
    mean = by_platform(
        jnp.abs(w),
        tpu=lambda a: jnp.mean(a, axis=axes, keepdims=True),  # in 1,024 lanes
        default=lambda a: _mean(a, axes),
    )
    inverse = 1 / jnp.maximum(mean, LEAST)
    codes = jnp.clip(jnp.round(w * inverse), -1, 1).astype(jnp.int8)
    return codes, 1 / inverse


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    """Mean along negative axes, which stay with size 1: one over at most GROUP values after the
    other, since a float32 sum over millions in a row loses most of its digits."""
    for axis in axes:
        at = x.ndim + axis
        while (size := x.shape[at]) > 1:
            group = next(n for n in range(min(size, GROUP), 0, -1) if size % n == 0)
            group = size if group == 1 else group  # a prime
            shape = (*x.shape[:at], size // group, group, *x.shape[at + 1 :])
            x = jnp.mean(x.reshape(shape), axis=at + 1)
    return x


def int8_tokens(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """int8 codes of `x`, and the float32 factor of each token, whose values are along `axes`."""
    x = x.astype(jnp.float32)
    factor = 127 / jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), LEAST)
    return jnp.clip(jnp.round(x * factor), -128, 127).astype(jnp.int8), factor
