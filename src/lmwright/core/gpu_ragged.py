"""Products of rows in groups on GPUs from Ampere on, by kernels in Triton through Pallas.

    rows      0 0 0 0 0 1 1 | 3 3 3 3 | -      sizes [5, 2, 0, 4]; the last row is nobody's
    tiles     [0 0 0 0][0 ] [1 1 ] [3 3 3 3] [- ]

A tile lies within one group, so that one matrix meets it, and each group begins a new one: T rows
in E groups take at most T / rows + E + 1 tiles, the grid of the kernel, and those too many do
nothing. The gradient of a matrix is summed by one program for each piece of it, in the order of
the rows: the same bits each time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

LEAST, MOST, MOST_SUMMED = 16, 128, 64  # sides of a block: of tensor cores, of an L4's memory
NEIGHBORS = 8  # tiles of rows that run side by side share their columns of the matrix in the cache

Ref = Any


@dataclass(frozen=True)
class Call:
    """Static arguments of the kernels."""

    rows: int
    columns: int
    summed: int
    """Numbers of a row, or rows, that are read at a time."""
    transposed: bool = False
    """True if the matrices are [outputs, inputs]."""
    interpret: bool = False

    def run(self, kernel: Callable[..., None], **options: Any) -> Callable[..., Any]:
        """The kernel as a function of arrays."""
        warps = 8 if self.rows * self.columns >= MOST * MOST else 4
        params = triton.CompilerParams(num_warps=warps, num_stages=3)
        return pl.pallas_call(
            partial(kernel, self), compiler_params=params, interpret=self.interpret, **options
        )


class Tiles(NamedTuple):
    """Group, first row and end of the group of each tile, int32; no row of a tile too many."""

    group: Array
    first: Array
    end: Array

    @classmethod
    def of(cls, sizes: Array, num_rows: int, rows: int) -> "Tiles":
        """The tiles of `rows` rows; the group after the last one holds nobody's rows."""
        num_groups = sizes.shape[0]
        sizes = jnp.append(sizes, num_rows - jnp.sum(sizes))
        ends, tiles = jnp.cumsum(sizes), -(-sizes // rows)
        last = jnp.cumsum(tiles)
        tile = jnp.arange(NEIGHBORS * pl.cdiv(num_rows // rows + num_groups + 1, NEIGHBORS))
        group = jnp.sum(tile[:, None] >= last, axis=1)
        at = jnp.minimum(group, num_groups)
        first = (ends - sizes)[at] + (tile - (last - tiles)[at]) * rows
        end = jnp.where(group > num_groups, 0, ends[at])
        return cls(*(a.astype(jnp.int32) for a in (at, first, end)))


def product(
    x: Array, w: Array, sizes: Array, dtype: jnp.dtype, *,
    transposed: bool = False, interpret: bool = False,
) -> Array:  # fmt: skip
    """`dtype` [T, F]: rows x [T, D] times the matrix of their group, w [E, D, F], or [E, F, D]
    `transposed`; summed in float32. int32 `sizes` [E]; rows after the last group give zeros."""
    (num_rows, inputs), (groups, first, second) = x.shape, w.shape
    outputs = first if transposed else second
    rows = min(MOST, max(LEAST, _power_of_2(num_rows // groups)))
    call = Call(rows, _side(outputs, MOST), _side(inputs, MOST_SUMMED), transposed, interpret)
    tiles = Tiles.of(sizes, num_rows, rows)
    out = jax.ShapeDtypeStruct((num_rows, outputs), dtype)
    grid = (tiles.group.shape[0] * pl.cdiv(outputs, call.columns),)
    return call.run(_product_kernel, grid=grid, out_shape=out)(x, w, *tiles)


def gradient(x: Array, g: Array, sizes: Array, *, interpret: bool = False) -> Array:
    """float32 [E, D, F]: gradient of the matrices for rows x [T, D] and the gradient g [T, F] of
    their products; zeros for an empty group."""
    groups, inputs, outputs = sizes.shape[0], x.shape[1], g.shape[1]
    call = Call(_side(inputs, MOST), _side(outputs, MOST), MOST_SUMMED, interpret=interpret)
    grid = (pl.cdiv(inputs, call.rows), pl.cdiv(outputs, call.columns), groups)
    out = jax.ShapeDtypeStruct((groups, inputs, outputs), jnp.float32)
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    return call.run(_gradient_kernel, grid=grid, out_shape=out)(x, g, ends - sizes, ends)


def _power_of_2(size: int) -> int:
    """The largest one that is not larger."""
    return 1 << max(size, 1).bit_length() - 1


def _side(size: int, most: int) -> int:
    return max(LEAST, min(most, pl.next_power_of_2(size)))


def _product_kernel(call: Call, *refs: Ref) -> None:
    x_ref, w_ref, group_ref, first_ref, end_ref, y_ref = refs
    outputs, (groups, *_) = y_ref.shape[1], w_ref.shape
    number, band = pl.program_id(0), NEIGHBORS * pl.cdiv(outputs, call.columns)
    tile = number // band * NEIGHBORS + number % NEIGHBORS
    columns = number % band // NEIGHBORS * call.columns
    group, first, end = group_ref[tile], first_ref[tile], end_ref[tile]
    inside = _below(first, call.rows, end)

    def step(i: Array, sums: Array) -> Array:
        at = i * call.summed
        x = _block(x_ref, (first, call.rows), (at, call.summed), inside)
        sides = (at, call.summed), (columns, call.columns)
        if call.transposed:
            return sums + dot(x, _block(w_ref, *sides[::-1], group=group).T)
        return sums + dot(x, _block(w_ref, *sides, group=group))

    steps = (group < groups).astype(jnp.int32) * pl.cdiv(x_ref.shape[1], call.summed)
    sums = jnp.zeros((call.rows, call.columns), jnp.float32)
    sums = lax.fori_loop(0, steps, step, sums)
    at = pl.ds(first, call.rows), pl.ds(columns, call.columns)
    inside = inside[:, None] & _below(columns, call.columns, outputs)[None]
    triton.store(y_ref.at[at], sums.astype(y_ref.dtype), mask=inside)


def _gradient_kernel(call: Call, *refs: Ref) -> None:
    x_ref, g_ref, start_ref, end_ref, dw_ref = refs
    _, inputs, outputs = dw_ref.shape
    group = pl.program_id(2)
    row, column = pl.program_id(0) * call.rows, pl.program_id(1) * call.columns
    start, end = start_ref[group], end_ref[group]

    def step(whole: bool, i: Array, sums: Array) -> Array:
        at = start + i * call.summed, call.summed
        inside = None if whole else _below(*at, end)
        x = _block(x_ref, at, (row, call.rows), inside)
        return sums + dot(x.T, _block(g_ref, at, (column, call.columns), inside))

    size, sums = end - start, jnp.zeros((call.rows, call.columns), jnp.float32)
    whole = size // call.summed
    sums = lax.fori_loop(0, whole, partial(step, True), sums)
    sums = lax.fori_loop(whole, pl.cdiv(size, call.summed), partial(step, False), sums)
    inside = _below(row, call.rows, inputs)[:, None] & _below(column, call.columns, outputs)[None]
    at = pl.ds(row, call.rows), pl.ds(column, call.columns)
    triton.store(dw_ref.at[(group, *at)], sums, mask=inside)


def _below(start: Any, size: int, end: Any) -> Array:
    """bool [size]: True for the numbers from `start` on that are below `end`."""
    return start + jnp.arange(size, dtype=jnp.int32) < end


def _block(
    ref: Ref, rows: tuple[Any, int], columns: tuple[Any, int], inside: Array | None = None,
    group: Any = None,
) -> Array:  # fmt: skip
    """Rows and columns (first, number) of a matrix, that of a group if there are several; zeros
    where the matrix has ended, and for rows that are not `inside`, which lie before its end."""
    num_rows, num_columns = ref.shape[-2:]
    masks = []
    if inside is not None or num_rows % rows[1]:
        inside = _below(*rows, num_rows) if inside is None else inside
        masks.append(jnp.broadcast_to(inside[:, None], (rows[1], columns[1])))
    if num_columns % columns[1]:
        below = _below(*columns, num_columns)
        masks.append(jnp.broadcast_to(below[None], (rows[1], columns[1])))
    at = pl.ds(*rows), pl.ds(*columns)
    place = ref.at[at if group is None else (group, *at)]
    return triton.load(place, mask=reduce(and_, masks), other=0.0) if masks else place[...]


def dot(a: Array, b: Array) -> Array:
    """float32 product of matrices in a kernel; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
