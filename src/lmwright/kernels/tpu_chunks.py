"""Common parts of TPU kernels that go chunk by chunk over a row of a head, and keep its state in
vector memory.

    grid (row, head or heads, chunk)      marks [8, L] of a chunk say what its gates do
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lmwright.kernels.tpu_row_attention import Ref

SHORTEST = 64  # tokens of a chunk
TILE = 16  # sublanes in bfloat16
TOTAL, INPUT, SCALE, CARRIED, LAST, FIRST, MORE, MOST = range(8)
"""Rows of the marks (`mlstm_marks.Marks`) and two more, whose meaning is the kernel's own."""


class Chunk:
    """The marks of a chunk, as rows [1, L] and as columns [L, 1]."""

    def __init__(self, marks: Array):
        self.rows = marks
        self.size = self.rows.shape[1]
        self.columns = self.rows.T

    def row(self, which: int) -> Array:
        """[1, L]."""
        return self.rows[which : which + 1, :]

    def column(self, which: int) -> Array:
        """[L, 1]."""
        return self.columns[:, which : which + 1]

    @property
    def keep(self) -> Array:
        """[1, 1]: the share of the memory before the chunk that is left after it."""
        return self.rows[CARRIED : CARRIED + 1, self.size - 1 :]

    def seen(self) -> Array:
        """bool [reader, read]: tokens of one document, where the reader does not come first."""
        reader, read = pairs(self.size)
        return (read <= reader) & (read >= self.column(FIRST).astype(jnp.int32))


def pairs(size: int) -> tuple[Array, Array]:
    """int32 [reader, read] each: the places of two tokens of a chunk."""
    reader, read = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return reader, read


def start(*sums: Ref) -> None:
    """Zeros in the first chunk of a row."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        for each in sums:
            each[...] = jnp.zeros_like(each)


def like(array: Array) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@dataclass(frozen=True)
class Call:
    """Calls of kernels."""

    size: int
    """Tokens of a chunk."""
    heads: int | None = None
    """Heads of a step; blocks of one have no axis of heads if it is unset."""
    interpret: Any = False

    def __call__(
        self,
        kernel: Callable[..., None],
        name: str,
        arrays: tuple[Array, ...],
        out: list[jax.ShapeDtypeStruct],
        state: list[tuple[int, ...]],
        *,
        from_last: bool = False,
    ) -> list[Array]:
        """`kernel(*arrays, *out, *state)`; `arrays` and `out` are [B, N, T, .], or [B, N, C, ., .]
        of a chunk each. The first ones are the marks; others may have fewer heads, each of which
        belongs to several. `state` are the shapes of float32 memories, and chunks come `from_last`
        to first."""
        b, n, count, *_ = arrays[0].shape
        steps = n // (self.heads or 1)

        def chunk(array: Any) -> pl.BlockSpec:
            several = None if self.heads is None else array.shape[1] // steps
            inside = array.shape[3:] if len(array.shape) == 5 else (self.size, array.shape[3])
            block = (None, several, *([None] if len(array.shape) == 5 else []), *inside)
            rest = len(block) - 3

            def at(b: Array, n: Array, c: Array) -> tuple[Any, ...]:
                return b, n, count - 1 - c if from_last else c, *(0,) * rest

            return pl.BlockSpec(block, at)

        with jax.named_scope(name):
            return pl.pallas_call(
                kernel,
                name=name,
                grid=(b, steps, count),
                in_specs=[*map(chunk, arrays)],
                out_specs=[*map(chunk, out)],
                out_shape=out,
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in state],
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "parallel", "arbitrary")
                ),
                interpret=self.interpret,
                metadata={"xprof_metadata": json.dumps({"chunk": self.size})},  # for `kernel_cost`
            )(*arrays)
