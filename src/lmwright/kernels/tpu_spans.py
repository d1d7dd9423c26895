"""Which blocks of a long row `tpu_long_attention` visits, and in what order.

A row of T tokens is cut into spans, which are fetched from the chip's memory, and a span into
blocks, whose scores exist at once:

    span of queries  [block block]
    span of keys     [    block     block    ]

Which keys a query sees is an interval, `start <= key < end`. Tables of the intervals' extremes say
which spans meet, and which blocks of theirs are left out, computed as they are, or with a mask.
Kernels take the spans of one side in pairs, the first with the last and so on, so that the pairs
of a causal row have the same number of steps; those of a row seen both ways have it in any order.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from lmwright.core.compute import LANES
from lmwright.nn.intervals import Reach

VECTOR_MEMORY = 2**24  # bytes that a kernel may use on every generation
SHAPES = (
    (512, 1024, 1024, 2048),
    (512, 1024, 1024, 1024),
    (512, 1024, 512, 1024),
    (512, 512, 512, 512),
    (256, 256, 256, 256),
    (LANES, LANES, LANES, LANES),
)
"""The most tokens of a block of queries and of keys, and of a span of each; the best shape
first."""

BAND = 256  # queries of a block where few keys before and after them are seen
MOST_BAND = 1024  # keys that such a block sees
BAND_SPANS = (2048, 1024, 512)
CAUSAL = Reach(after=0)

Ref = Any  # of an array in a memory of the chip
Flag = Any  # a boolean, known or traced


class Sizes(NamedTuple):
    """Tokens of a row, of a block of queries and of keys, and of a span of each."""

    tokens: int
    block_q: int
    block_k: int
    span_q: int
    span_k: int
    band: bool = False
    """True where a block of queries meets a span of keys in one block, placed where the queries see
    instead of on a grid."""

    @property
    def spans_q(self) -> int:
        """Spans of queries in a row."""
        return self.tokens // self.span_q

    @property
    def spans_k(self) -> int:
        """Spans of keys in a row."""
        return self.tokens // self.span_k

    def vector_memory(self, head_dim: int, itemsize: int) -> int:
        """Bytes of vector memory that the backward kernel needs: double-buffered queries, keys,
        values and gradients; transposed keys and values; sums; and scores of a block with their
        gradients."""
        wide = -(-head_dim // LANES) * LANES
        by_query = head_dim * (4 * itemsize + 3 * 4) + 4 * 2 * 4 * 8
        by_key = head_dim * (8 * itemsize + 2 * 4) + 2 * wide * itemsize
        scores = self.block_q * self.block_k * (2 * 4 + 2 * itemsize)
        return self.span_q * by_query + self.span_k * by_key + scores


def fits(seq_len: int, head_dim: int) -> bool:
    """True for rows and heads that fill tiles; no row is too long."""
    return seq_len % LANES == 0 and head_dim % 16 == 0


def sizes_of(seq_len: int, head_dim: int, itemsize: int, reach: Reach = CAUSAL) -> Sizes:
    """The best sizes that divide a row, for which `fits` holds, and fit the vector memory."""
    every = [_divide(seq_len, *shape) for shape in SHAPES]
    if reach.before is not None and reach.after:
        sides = [-(-side // LANES) * LANES for side in (reach.before, reach.after)]
        bands = [_divide(seq_len, BAND, LANES, span, span) for span in BAND_SPANS]
        bands = [s._replace(block_k=sum(sides) + s.block_q, band=True) for s in bands]
        every = [s for s in bands if s.block_k <= min(MOST_BAND, s.span_k)] + every
    return next(s for s in every if s.vector_memory(head_dim, itemsize) <= VECTOR_MEMORY)


def _divide(seq_len: int, block_q: int, block_k: int, span_q: int, span_k: int) -> Sizes:
    def part(of: int, most: int, unit: int) -> int:
        return next(n for n in range(max(most // unit, 1) * unit, 0, -unit) if of % n == 0)

    block_q, block_k = (part(seq_len, most, LANES) for most in (block_q, block_k))
    spans = part(seq_len, span_q, block_q), part(seq_len, span_k, block_k)
    return Sizes(seq_len, block_q, block_k, *spans)


class Step(NamedTuple):
    """One step of a kernel's grid."""

    queries: Any
    """Number of the span."""
    keys: Any
    active: Flag
    """False for steps after the last of a pair."""
    first: Flag
    """True for the first step of a span of the outer side."""
    last: Flag


class Tables(NamedTuple):
    """int32 tables of a batch of rows, one row after the other."""

    low: Ref
    """The first span of the inner side that a span of the outer side meets."""
    high: Ref
    """The end of these spans."""
    begins: Ref
    """The span of keys that meets a span of queries first."""
    min_start: Ref
    """Least start of the intervals of each block of queries; the following are alike."""
    max_start: Ref
    min_end: Ref
    max_end: Ref

    def seen(self, sizes: Sizes, row: Any, queries: Any, keys: Any, unit: int) -> tuple[Flag, Flag]:
        """(some query of a block sees a key of a block, all queries see all of its keys); the block
        of keys begins `keys` units after the start of the row."""
        at = row * (sizes.tokens // sizes.block_q) + queries
        first = keys * unit
        end = first + sizes.block_k
        some = (self.min_start[at] < end) & (self.max_end[at] > first)
        every = (self.max_start[at] <= first) & (self.min_end[at] >= end)
        return some, some & every


class Walk(NamedTuple):
    """The order in which a kernel visits the spans of a row."""

    sizes: Sizes
    by_keys: bool
    """True if the outer spans are those of keys."""

    @property
    def outer(self) -> int:
        """Spans of the outer side."""
        return self.sizes.spans_k if self.by_keys else self.sizes.spans_q

    @property
    def pairs(self) -> int:
        """Number of pairs of spans; the middle span of an odd number is alone."""
        return -(-self.outer // 2)

    @property
    def order(self) -> list[int]:
        """Outer spans in the order of the visits."""
        last = self.outer - 1
        both = ((pair, last - pair) for pair in range(self.pairs))
        return [span for pair in both for span in dict.fromkeys(pair)]

    def step(self, tables: Tables, row: Any, pair: Any, step: Any) -> Step:
        """The spans that a row visits in a step of a pair."""
        base, other = row * self.outer, self.outer - 1 - pair
        before = tables.high[base + pair] - tables.low[base + pair]
        second = (step >= before) & (other > pair)
        outer = jnp.where(second, other, pair)
        step = jnp.where(second, step - before, step)
        low = tables.low[base + outer]
        count = tables.high[base + outer] - low
        inner = low + jnp.minimum(step, count - 1)
        queries, keys = (inner, outer) if self.by_keys else (outer, inner)
        return Step(queries, keys, step < count, step == 0, step == count - 1)

    def most_steps(self, reach: Reach) -> int:
        """The most steps of a pair in a row of one segment; several segments need no more."""
        met = spans_met(self.sizes, reach)
        spans = [sum(row) for row in (zip(*met, strict=True) if self.by_keys else met)]
        return max(
            spans[pair] + (spans[-1 - pair] if pair < self.outer - 1 - pair else 0)
            for pair in range(self.pairs)
        )

    def tables(self, start: Array, end: Array) -> Tables:
        """Tables for intervals [B, T], of which empty ones stand at their query."""
        sizes, rows = self.sizes, start.shape[0]
        least = start.reshape(rows, sizes.spans_q, -1).min(axis=2)
        most = end.reshape(rows, sizes.spans_q, -1).max(axis=2)
        low, high = lax.div(least, sizes.span_k), lax.div(most - 1, sizes.span_k) + 1
        begins = low
        if self.by_keys:
            keys = jnp.arange(sizes.spans_k, dtype=jnp.int32)[:, None]
            queries = jnp.arange(sizes.spans_q, dtype=jnp.int32)
            met = (low[:, None] <= keys) & (high[:, None] > keys)  # [B, spans_k, spans_q]
            low = jnp.min(jnp.where(met, queries, sizes.spans_q - 1), axis=2)
            high = jnp.maximum(jnp.max(jnp.where(met, queries + 1, 0), axis=2), low + 1)
            visited = (low[:, :, None] <= queries) & (high[:, :, None] > queries)
            order = jnp.array(self.order, jnp.int32)
            begins = order[jnp.argmax(visited[:, order], axis=1)]
        blocks = (a.reshape(rows, -1, sizes.block_q) for a in (start, start, end, end))
        extremes = (jnp.min, jnp.max, jnp.min, jnp.max)
        by_block = [of(a, axis=2) for of, a in zip(extremes, blocks, strict=True)]
        return Tables(*(a.reshape(-1) for a in (low, high, begins, *by_block)))


def spans_met(sizes: Sizes, reach: Reach) -> list[list[bool]]:
    """True by [span of queries][span of keys] where they meet in a row of one segment."""
    starts = range(0, sizes.tokens, sizes.span_k)
    keys = [range(start, start + sizes.span_k) for start in starts]
    return [
        [reach.meets(range(first, first + sizes.span_q), span) for span in keys]
        for first in range(0, sizes.tokens, sizes.span_q)
    ]


class Specs(NamedTuple):
    """Block specs: where a step of the grid finds its spans."""

    walk: Walk
    group: int
    """Query heads of a kv head."""
    pieces: int = 1
    """Rows of an array that are one row of the kernel (`kernels.tpu_pieces`)."""

    def _index(self, side: str, row: Any, head: Any, pair: Any, number: Any, *rest: Any) -> Any:
        """(row, head, span) of an operand."""
        member, tables = (rest[0], rest[1:]) if self.walk.by_keys else (None, rest)
        step = self.walk.step(Tables(*tables), row, pair, number)
        if side == "keys":
            kv = head if self.walk.by_keys else lax.div(head, self.group)
            return row, kv, step.keys
        query_head = head * self.group + member if self.walk.by_keys else head
        return row, query_head, step.queries

    def _place(self, side: str, step: tuple[Any, ...]) -> Any:
        """(row, head, span) of an operand whose rows are cut into pieces."""
        row, head, span = self._index(side, *step)
        if self.pieces == 1:
            return row, head, span
        sizes = self.walk.sizes
        count = (sizes.spans_k if side == "keys" else sizes.spans_q) // self.pieces
        return row * self.pieces + lax.div(span, count), head, lax.rem(span, count)

    def of(self, side: str, rows: int) -> pl.BlockSpec:
        """Block spec of an array [B, heads, rows, T], by the spans of one side."""
        size = self.walk.sizes.span_k if side == "keys" else self.walk.sizes.span_q

        def index(*step: Any) -> Any:
            row, head, span = self._place(side, step)
            return row, head, 0, span

        return pl.BlockSpec((None, None, rows, size), index)

    def turned_keys(self, head_dim: int) -> pl.BlockSpec:
        """Block spec of an array [B, K, T, H], by spans of keys."""
        index = lambda *step: (*self._place("keys", step), 0)  # noqa: E731
        return pl.BlockSpec((None, None, self.walk.sizes.span_k, head_dim), index)

    def intervals(self) -> pl.BlockSpec:
        """Block spec of an array [B, 1, T], by spans of queries."""

        def index(*step: Any) -> Any:
            row, _, span = self._index("queries", *step)
            return row, 0, span

        return pl.BlockSpec((None, 1, self.walk.sizes.span_q), index)


def span_of_queries(sizes: Sizes, array: Ref, row: Any, head: Any, number: Any) -> Ref:
    """Span `number` of a row's queries in an array [B, N, H, T] in the chip's memory; its rows may
    be pieces of them."""
    size, count = sizes.span_q, array.shape[3] // sizes.span_q
    row = row * (sizes.spans_q // count) + lax.div(number, count)
    first = pl.multiple_of(lax.rem(number, count) * size, size)
    return array.at[row, head, :, pl.ds(first, size)]
