"""Integers of four bits, widened to the numbers that they stand for."""

import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.compute import LANES
from lmwright.core.leaves import Int4
from lmwright.core.sharding import by_platform


def in_blocks(w: Array, axis: int, size: int) -> Array:
    """`w` with its axis cut in two: blocks, and `size` of each."""
    return w.reshape(*w.shape[:axis], -1, size, *w.shape[axis + 1 :])


def widened(w: Int4, dtype: jnp.dtype) -> Array:
    """The array in `dtype` that integers and the scales of their blocks stand for."""

    def one(values: Array, scale: Array) -> Array:
        return _by_blocks(values, scale, w, dtype)

    def on_tpu(values: Array, scale: Array) -> Array:
        return _by_product(values, scale, w, dtype)

    if _axis(w) < w.inputs:  # a single matrix, which the compiler widens inside its product
        return one(w.values, w.scale)
    return by_platform(w.values, w.scale, tpu=on_tpu, default=one)


def _axis(w: Int4) -> int:
    """The axis that is cut in blocks."""
    return w.values.ndim - w.outputs - 1


def _by_blocks(values: Array, scale: Array, w: Int4, dtype: jnp.dtype) -> Array:
    axis = _axis(w)
    size = values.shape[axis] // scale.shape[axis]
    numbers = in_blocks(_numbers(values, w, dtype), axis, size)
    return (numbers * jnp.expand_dims(scale.astype(dtype), axis + 1)).reshape(values.shape)


def _by_product(values: Array, scale: Array, w: Int4, dtype: jnp.dtype) -> Array:
    """Matrices of experts: scales are repeated by a product with ones and zeros, which is exact.
    Repeated as such, they are written to memory, in more time than all the rest takes."""
    axis = _axis(w)
    size, blocks = values.shape[axis] // scale.shape[axis], scale.shape[axis]
    together = max(n for n in range(1, min(blocks, LANES) + 1) if blocks % n == 0)
    numbers = in_blocks(values, axis, size * together)
    scale = in_blocks(scale, axis, together)  # [*before, groups, together, *outputs]
    before = scale.shape[: axis + 1]
    ones = jnp.repeat(jnp.eye(together, dtype=jnp.bfloat16), size, axis=0)
    # as a constant, XLA would take it out of the batch and turn the result around
    ones = lax.optimization_barrier(jnp.broadcast_to(ones, (*before, *ones.shape)))
    batch = tuple(range(axis + 1))
    repeated = lax.dot_general(
        ones, scale.astype(jnp.bfloat16), (((axis + 2,), (axis + 1,)), (batch, batch)),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return (_numbers(numbers, w, jnp.float32) * repeated).astype(dtype).reshape(values.shape)


def _numbers(values: Array, w: Int4, dtype: jnp.dtype) -> Array:
    n = values.astype(dtype)
    if not w.mxfp4:
        return n
    a = jnp.abs(n)  # MXFP4's levels, doubled, by their number: 0 1 2 3 4 6 8 12, with its sign
    return jnp.sign(n) * jnp.where(a > 6, 12, jnp.where(a > 4, 2 * a - 4, a))
