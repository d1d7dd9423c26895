"""Scales of GGUF's K-quants: 256 inputs of an output share a float16 unit, groups of 16 or 32 of
them have a small integer each, and Q4_K and Q5_K have offsets of the same kind beside them.

    value = unit * scale[group] * code  -  offset unit * offset[group]

Each group gets the scale and offset with the least squared error, as in llama.cpp's search: some
steps are tried, and for the codes of each the best two numbers follow by least squares. What the
integers of a block can say is then tried around that.
"""

from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

BLOCK = 256  # inputs that share a unit
SIGNED = np.linspace(0.6, 1.1, 26)  # steps that are tried, by the one that reaches the largest
STEPS = np.linspace(-1.0, 1.0, 21)  # added to the number of steps between the least and the largest
AROUND = (-1.0, 0.0, 1.0)  # tried beside an integer


class Kind(NamedTuple):
    """A K-quant: its codes, and how a group says its scale."""

    low: int
    high: int
    group: int
    """Inputs that share a scale."""
    most: int
    """The largest integer that a scale has."""
    offset: bool


KINDS = {
    "q4_k": Kind(0, 15, 32, 63, offset=True),
    "q5_k": Kind(0, 31, 32, 63, offset=True),
    "q6_k": Kind(-32, 31, 16, 127, offset=False),
}


class Scales(NamedTuple):
    """Scales of codes and offsets that are taken off, float32 [groups, O] each, and the units
    [blocks, O] whose multiples they are."""

    scale: Array
    unit: Array
    offset: Array
    offset_unit: Array


@partial(jax.jit, static_argnames="grid")
def searched(w: Array, weights: Array, grid: str) -> Scales:
    """Scales of w [I, O] with the least squared error, where inputs count by `weights` [I]."""
    kind = KINDS[grid]
    x = w.reshape(-1, kind.group, w.shape[1])  # [groups, inputs, O]
    counts = weights.reshape(-1, kind.group, 1)
    scale, offset = (_with_offset if kind.offset else _signed)(x, counts, kind)
    unit, scales = _multiples(scale, kind, -kind.most - 1 if kind.low else 0)
    offset_unit, offsets = _multiples(offset, kind, 0)

    def one(best: tuple[Array, ...], around: Array) -> tuple[tuple[Array, ...], None]:
        whole = jnp.clip(scales + around[0], -kind.most - 1 if kind.low else 0, kind.most)
        below = jnp.clip(offsets + around[1], 0, kind.most)
        tried = _spread(unit, whole), _spread(offset_unit, below)
        error = _error(x, counts, *tried, kind)
        better = error < best[0]
        return tuple(jnp.where(better, *a) for a in zip((error, *tried), best, strict=True)), None

    pairs = [(0.0, 0.0), *product(AROUND, AROUND if kind.offset else (0.0,))]
    start = jnp.full_like(scale, jnp.inf), scale, offset
    (_, scale, offset), _ = lax.scan(one, start, jnp.asarray(pairs, jnp.float32))
    return Scales(scale[:, 0], unit, offset[:, 0], offset_unit)


def in_units(a: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Integers [out, blocks, groups of a block] of which numbers [out, groups] are the multiples of
    units [out, blocks]. float32 holds the products exactly: 11 bits times 8."""
    groups, by = a.reshape(*unit.shape, -1), unit[..., None]
    return np.divide(groups, by, out=np.zeros_like(groups), where=by != 0)


def _signed(x: Array, counts: Array, kind: Kind) -> tuple[Array, Array]:
    """Scales [groups, 1, O] of codes on both sides of zero, and no offsets."""
    at = jnp.argmax(jnp.abs(x), axis=1, keepdims=True)
    own = jnp.take_along_axis(x, at, axis=1) / kind.low  # the largest is the lowest code
    nothing = jnp.zeros_like(own)

    def one(best: tuple[Array, Array], ratio: Array) -> tuple[tuple[Array, Array], None]:
        codes = _codes(x, own * ratio, kind)
        squares = jnp.sum(counts * codes * codes, axis=1, keepdims=True)
        scale = _ratio(jnp.sum(counts * codes * x, axis=1, keepdims=True), squares)
        error = _error(x, counts, scale, nothing, kind)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scale, best[1])), None

    start = jnp.full_like(own, jnp.inf), own
    tried = jnp.asarray([sign * ratio for sign in (1, -1) for ratio in SIGNED], jnp.float32)
    return lax.scan(one, start, tried)[0][1], nothing


def _with_offset(x: Array, counts: Array, kind: Kind) -> tuple[Array, Array]:
    """Scales and offsets [groups, 1, O] of codes from zero on; zero is among the values."""
    low = jnp.minimum(jnp.min(x, axis=1, keepdims=True), 0.0)
    reach = jnp.max(x, axis=1, keepdims=True) - low
    total = partial(jnp.sum, axis=1, keepdims=True)

    def one(best: tuple[Array, ...], more: Array) -> tuple[tuple[Array, ...], None]:
        codes = _codes(x - low, reach / (kind.high + more), kind)
        sums = total(counts), total(counts * codes), total(counts * codes * codes)
        values, products = total(counts * x), total(counts * codes * x)
        scale, offset = _fitted(sums, values, products)
        error = total(counts * jnp.square(x - codes * scale + offset))
        better = error < best[0]
        found = error, scale, offset
        return tuple(jnp.where(better, *a) for a in zip(found, best, strict=True)), None

    start = jnp.full_like(low, jnp.inf), reach / kind.high, -low
    (_, scale, offset), _ = lax.scan(one, start, jnp.asarray(STEPS, jnp.float32))
    return scale, offset


def _fitted(sums: tuple[Array, ...], values: Array, products: Array) -> tuple[Array, Array]:
    """The scale and the offset, neither below zero, with the least squared error for codes: sums of
    the counts, the codes and their squares, of the values, and of both together."""
    ones, codes, squares = sums
    by = ones * squares - codes * codes
    scale = _ratio(ones * products - values * codes, by)
    offset = _ratio(codes * products - squares * values, by)
    without = (offset < 0) | (by <= 0)
    scale = jnp.maximum(jnp.where(without, _ratio(products, squares), scale), 0.0)
    level = jnp.where(squares == 0, jnp.maximum(-_ratio(values, ones), 0.0), 0.0)  # of codes 0
    return scale, jnp.where(without, level, offset)


def _multiples(a: Array, kind: Kind, low: int) -> tuple[Array, Array]:
    """float16 units, as float32 [blocks, O], and the integers [groups, 1, O] that say `a`."""
    groups = a.reshape(-1, BLOCK // kind.group, a.shape[-1])
    top = jnp.take_along_axis(groups, jnp.argmax(jnp.abs(groups), axis=1, keepdims=True), axis=1)
    unit = (top[:, 0] / (low or kind.most)).astype(jnp.float16).astype(jnp.float32)
    whole = jnp.round(_ratio(groups, unit[:, None]))
    return unit, jnp.clip(whole, low, kind.most).reshape(a.shape)


def _spread(unit: Array, whole: Array) -> Array:
    """Multiples [groups, 1, O] of units [blocks, O]."""
    return jnp.repeat(unit, len(whole) // len(unit), axis=0)[:, None] * whole


def _codes(x: Array, scale: Array, kind: Kind) -> Array:
    return jnp.clip(jnp.round(_ratio(x, scale)), kind.low, kind.high)


def _error(x: Array, counts: Array, scale: Array, offset: Array, kind: Kind) -> Array:
    apart = x - _codes(x + offset, scale, kind) * scale + offset
    return jnp.sum(counts * jnp.square(apart), axis=1, keepdims=True)


def _ratio(a: Array, b: Array) -> Array:
    """a / b, zero where b is."""
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))
