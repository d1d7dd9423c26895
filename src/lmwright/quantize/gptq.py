"""GPTQ (https://arxiv.org/abs/2210.17323): a matrix as integers, whose results stay near those of
the floats on the inputs that were measured.

    scales   one for a group of inputs and an output: of some tried, the one with the least error
    codes    input after input, those with the largest moments first; the error that one leaves is
             made up for by the inputs that are still floats

Scales are fixed before the codes, so the order of inputs leaves no trace in a file.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lmwright.core.rounding import Grid
from lmwright.quantize.grids import BLOCKS, RULES, GridName
from lmwright.quantize.least import codes_of, least
from lmwright.quantize.superblocks import KINDS, Scales, searched

Method = Literal["gptq", "nearest"]
DAMPING = 0.01  # of the mean moment, so that inputs that never vary apart can be told apart
BLOCK = 128  # inputs whose errors reach the later ones by one product
TRIED = np.linspace(0.5, 1.1, 25)  # scales, by the grid's own


class Integers(NamedTuple):
    """A matrix [I, O] as integers."""

    codes: Array
    """int8 [I, O]."""
    scale: Array
    """float32 [groups, O]; its products with the codes are what is computed with."""
    error: Array
    """float32, mean squared error of results as a share of their mean square."""
    offset: Array | None = None
    """float32 [groups, O] of K-quants, which is taken off those products."""
    unit: Array | None = None
    """float32 [blocks, O] of K-quants, whose multiples the scales are."""
    offset_unit: Array | None = None
    """The same of the offsets."""


class Inputs(NamedTuple):
    """The inputs of a matrix as they were measured, and what follows from that for all matrices
    that read them."""

    moments: Array
    """float32 [I, I]."""
    weights: Array
    """float32 [I]: how much each counts by itself."""
    order: Array
    """int [I]: those with the largest moments first."""
    factor: Array
    """float32 [I, I], in that order, upper triangular: its row i says how the later inputs make up
    for an error of input i."""


@partial(jax.jit, static_argnames=("grid", "group"))
def nearest(w: Array, moments: Array, grid: GridName, group: int) -> Integers:
    """Every weight of w [I, O] at the integer next to it, by the grid's own scales; `group` inputs
    share one, or all if it is 0."""
    rule = RULES[grid]
    if grid in KINDS:
        found = searched(w, jnp.ones(len(w)), grid)
        scale, offset = _each(found, len(w))
        return _in_blocks(w, moments, codes_of(w + offset, scale, rule), found)
    blocks = _blocks(w, group)
    scale, inverse = rule.scale(blocks)
    codes = jnp.clip(rule.whole(blocks * inverse), rule.low, rule.high)
    return _integers(w, moments, codes.reshape(w.shape), scale[:, 0])


@jax.jit
def prepared(moments: Array) -> Inputs:
    """The inputs of these moments [I, I], with all that GPTQ needs to know of them."""
    diagonal = jnp.diagonal(moments)
    damping = DAMPING * jnp.mean(diagonal)
    # without any moments: as if all inputs were alike
    damping = jnp.where(damping > 0, damping, 1.0)
    order = jnp.argsort(-diagonal)
    damped = moments + damping * jnp.eye(len(moments))
    return Inputs(moments, diagonal + damping, order, _factor(damped[order][:, order]))


@partial(jax.jit, static_argnames=("grid", "group"))
def gptq(w: Array, inputs: Inputs, grid: GridName, group: int) -> Integers:
    """The integers of float32 w [I, O]; `group` inputs share a scale, or all if it is 0. Inputs
    that were never seen are rounded to the nearest."""
    rule, size, order = RULES[grid], w.shape[0], inputs.order
    if grid in KINDS:
        found = searched(w, inputs.weights, grid)
        scale, offset = _each(found, size)
        codes = _in_turn((w + offset)[order], scale[order], inputs.factor, rule)
        return _in_blocks(w, inputs.moments, jnp.zeros_like(w).at[order].set(codes), found)
    scale = _searched(_blocks(w, group), _blocks(inputs.weights, group), rule, grid)
    each = jnp.repeat(scale, group or size, axis=0)
    codes = _in_turn(w[order], each[order], inputs.factor, rule)
    return _integers(w, inputs.moments, jnp.zeros_like(w).at[order].set(codes), scale)


class Rounder:
    """Rounds matrices one after the other, by GPTQ or to the nearest integers. What follows from
    moments alone is computed once for those that read the same, as q, k and v do."""

    def __init__(self, method: Method, group: int):
        self.method, self.group = method, group
        self._inputs: Inputs | None = None

    def __call__(self, w: Array, moments: Array, grid: GridName) -> Integers:
        """The integers on a grid of w [I, O], for inputs of these moments [I, I]."""
        with jax.default_matmul_precision("highest"):
            w = w.astype(jnp.float32)
            if self.method == "nearest":
                return nearest(w, moments, grid, self.group)
            if self._inputs is None or not jnp.array_equal(self._inputs.moments, moments):
                self._inputs = None  # before there are two
                self._inputs = prepared(moments)
            return gptq(w, self._inputs, grid, self.group)


def _blocks(w: Array, group: int) -> Array:
    """[groups, inputs, outputs] of w [I, O], or [groups, inputs] of [I]."""
    return w.reshape(-1, group or w.shape[0], *w.shape[1:])


def _searched(blocks: Array, weights: Array, rule: Grid, grid: GridName) -> Array:
    """Scales [groups, O] with the least squared error of `blocks` [groups, inputs, O], where inputs
    count by `weights` [groups, inputs]."""
    own = rule.scale(blocks)[0]
    signs = (1.0, -1.0) if grid in BLOCKS else (1.0,)

    def by(part: Array) -> tuple[Array, ...]:
        scale = rule.stored(own * part)
        errors = jnp.square(blocks - codes_of(blocks, scale, rule) * scale)
        return jnp.sum(errors * weights[..., None], axis=1, keepdims=True), scale

    (scale,) = least((own,), [sign * part for sign in signs for part in (1.0, *TRIED)], by)
    return scale[:, 0]


def _factor(moments: Array) -> Array:
    """Upper triangular U with U'U the inverse of the moments. With the inputs in the opposite order
    their triangle is the inverse of U."""
    lower = jnp.linalg.cholesky(moments[::-1, ::-1])
    eye = jnp.eye(len(moments))
    return jax.scipy.linalg.solve_triangular(lower, eye, lower=True)[::-1, ::-1]


def _in_turn(w: Array, scale: Array, factor: Array, rule: Grid) -> Array:
    """Integers of w [I, O], as floats, chosen from the first input to the last."""
    size, outputs = w.shape
    block = min(BLOCK, size)
    more = -size % block
    w, scale = (jnp.pad(a, ((0, more), (0, 0))) for a in (w, scale))
    factor = jnp.pad(factor, ((0, more), (0, more))) + jnp.diag(
        jnp.where(jnp.arange(size + more) < size, 0.0, 1.0)
    )
    places = jnp.arange(size + more)

    def one_block(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        w, codes = state
        start = number * block
        rows = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=block)
        own, scales, factors = rows(w), rows(scale), rows(factor)
        inside = lax.dynamic_slice_in_dim(factors, start, block, axis=1)

        def one(i: Array, parts: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            own, found, errors = parts
            code = codes_of(own[i], scales[i], rule)
            error = (own[i] - code * scales[i]) / inside[i, i]
            later = jnp.where(jnp.arange(block) > i, inside[i], 0.0)
            own = own - later[:, None] * error
            return own, found.at[i].set(code), errors.at[i].set(error)

        empty = jnp.zeros((block, outputs), w.dtype)
        _, found, errors = lax.fori_loop(0, block, one, (own, empty, empty))
        behind = jnp.where(places >= start + block, factors, 0.0)
        w = w - jnp.matmul(behind.T, errors, precision=lax.Precision.HIGHEST)
        return w, lax.dynamic_update_slice_in_dim(codes, found, start, axis=0)

    steps = (size + more) // block
    return lax.fori_loop(0, steps, one_block, (w, jnp.zeros_like(w)))[1][:size]


def _each(found: Scales, size: int) -> tuple[Array, Array]:
    """Scale and offset [I, O] of each input."""
    scale, offset = (jnp.repeat(a, size // len(a), axis=0) for a in (found.scale, found.offset))
    return scale, offset


def _in_blocks(w: Array, moments: Array, codes: Array, found: Scales) -> Integers:
    done = _integers(w, moments, codes, found.scale, _each(found, len(w))[1])
    return done._replace(offset=found.offset, unit=found.unit, offset_unit=found.offset_unit)


def _integers(
    w: Array, moments: Array, codes: Array, scale: Array, offset: Array | float = 0.0
) -> Integers:
    values = codes * jnp.repeat(scale, len(w) // len(scale), axis=0) - offset
    error, whole = (_squares(a, moments) for a in (w - values, w))
    share = jnp.where(whole > 0, error / jnp.where(whole > 0, whole, 1.0), 0.0)
    return Integers(codes.astype(jnp.int8), scale, share)


def _squares(w: Array, moments: Array) -> Array:
    """Sum of the squared results of w [I, O] over the tokens of the moments."""
    return jnp.sum(w * jnp.matmul(moments, w, precision=lax.Precision.HIGHEST))
