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
from jax import Array

from lmwright.core.rounding import Grid
from lmwright.quantize.least import codes_of, least, ratio

BLOCK = 256  # inputs that share a unit
SIGNED = np.linspace(0.6, 1.1, 26)  # steps that are tried, by the one that reaches the largest
STEPS = np.linspace(-1.0, 1.0, 21)  # added to the number of steps between the least and the largest
AROUND = (-1.0, 0.0, 1.0)  # tried beside an integer


class Kind(NamedTuple):
    """A K-quant: its codes, and how a group says its scale."""

    rule: Grid
    group: int
    """Inputs that share a scale."""
    most: int
    """The largest integer that a scale has."""
    least: int
    offset: bool


KINDS = {
    "q4_k": Kind(Grid(0, 15), 32, 63, 0, offset=True),
    "q5_k": Kind(Grid(0, 31), 32, 63, 0, offset=True),
    "q6_k": Kind(Grid(-32, 31), 16, 127, -128, offset=False),
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
    unit, scales = _multiples(scale, kind, kind.least)
    offset_unit, offsets = _multiples(offset, kind, 0)

    def near(around: Array) -> tuple[Array, ...]:
        whole = jnp.clip(scales + around[0], kind.least, kind.most)
        below = jnp.clip(offsets + around[1], 0, kind.most)
        both = _spread(unit, whole), _spread(offset_unit, below)
        return _error(x, counts, *both, kind), *both

    pairs = [(0.0, 0.0), *product(AROUND, AROUND if kind.offset else (0.0,))]
    scale, offset = least((scale, offset), pairs, near)
    return Scales(scale[:, 0], unit, offset[:, 0], offset_unit)


def in_units(a: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Integers [out, blocks, groups of a block] of which numbers [out, groups] are the multiples of
    units [out, blocks]. float32 holds the products exactly: 11 bits times 8."""
    groups, by = a.reshape(*unit.shape, -1), unit[..., None]
    return np.divide(groups, by, out=np.zeros_like(groups), where=by != 0)


def _signed(x: Array, counts: Array, kind: Kind) -> tuple[Array, Array]:
    """Scales [groups, 1, O] of codes on both sides of zero, and no offsets."""
    at = jnp.argmax(jnp.abs(x), axis=1, keepdims=True)
    own = jnp.take_along_axis(x, at, axis=1) / kind.rule.low  # the largest is the lowest code
    nothing = jnp.zeros_like(own)

    def by(part: Array) -> tuple[Array, ...]:
        codes = codes_of(x, own * part, kind.rule)
        squares = jnp.sum(counts * codes * codes, axis=1, keepdims=True)
        scale = ratio(jnp.sum(counts * codes * x, axis=1, keepdims=True), squares)
        return _error(x, counts, scale, nothing, kind), scale

    (scale,) = least((own,), [sign * part for sign in (1, -1) for part in SIGNED], by)
    return scale, nothing


def _with_offset(x: Array, counts: Array, kind: Kind) -> tuple[Array, Array]:
    """Scales and offsets [groups, 1, O] of codes from zero on; zero is among the values."""
    low = jnp.minimum(jnp.min(x, axis=1, keepdims=True), 0.0)
    reach = jnp.max(x, axis=1, keepdims=True) - low
    total = partial(jnp.sum, axis=1, keepdims=True)

    def by(more: Array) -> tuple[Array, ...]:
        codes = codes_of(x - low, reach / (kind.rule.high + more), kind.rule)
        sums = total(counts), total(counts * codes), total(counts * codes * codes)
        values, products = total(counts * x), total(counts * codes * x)
        scale, offset = _fitted(sums, values, products)
        return total(counts * jnp.square(x - codes * scale + offset)), scale, offset

    scale, offset = least((reach / kind.rule.high, -low), STEPS, by)
    return scale, offset


def _fitted(sums: tuple[Array, ...], values: Array, products: Array) -> tuple[Array, Array]:
    """The scale and the offset, neither below zero, with the least squared error for codes: sums of
    the counts, the codes and their squares, of the values, and of both together."""
    ones, codes, squares = sums
    by = ones * squares - codes * codes
    scale = ratio(ones * products - values * codes, by)
    offset = ratio(codes * products - squares * values, by)
    without = (offset < 0) | (by <= 0)
    scale = jnp.maximum(jnp.where(without, ratio(products, squares), scale), 0.0)
    level = jnp.where(squares == 0, jnp.maximum(-ratio(values, ones), 0.0), 0.0)  # of codes 0
    return scale, jnp.where(without, level, offset)


def _multiples(a: Array, kind: Kind, low: int) -> tuple[Array, Array]:
    """float16 units, as float32 [blocks, O], and the integers [groups, 1, O] that say `a`."""
    groups = a.reshape(-1, BLOCK // kind.group, a.shape[-1])
    top = jnp.take_along_axis(groups, jnp.argmax(jnp.abs(groups), axis=1, keepdims=True), axis=1)
    unit = (top[:, 0] / (low or kind.most)).astype(jnp.float16).astype(jnp.float32)
    whole = jnp.round(ratio(groups, unit[:, None]))
    return unit, jnp.clip(whole, low, kind.most).reshape(a.shape)


def _spread(unit: Array, whole: Array) -> Array:
    """Multiples [groups, 1, O] of units [blocks, O]."""
    return jnp.repeat(unit, len(whole) // len(unit), axis=0)[:, None] * whole


def _error(x: Array, counts: Array, scale: Array, offset: Array, kind: Kind) -> Array:
    apart = x - codes_of(x + offset, scale, kind.rule) * scale + offset
    return jnp.sum(counts * jnp.square(apart), axis=1, keepdims=True)
