"""Which scores count: for each query of a row an interval of keys, start <= key < end.

    causal        [first of the segment, itself]              and its last `window` tokens alone
    both_ways     [first of the segment, last of the segment] and at most `reach` tokens away
    blocks        [first of the segment, last of its block]   block after block, as in diffusion

Tokens of a segment stand together. Padding is a segment like others.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from lmwright.nn.attention import Scoring, masked_attention


class Interval(NamedTuple):
    """Keys that the queries of rows see, int32 [B, T]; where `end` is not above `start`, none."""

    start: Array
    end: Array

    def mask(self, num_keys: int) -> Array:
        """bool [B, T, S], True where a query sees a key."""
        key = jnp.arange(num_keys, dtype=jnp.int32)
        return (key >= self.start[..., None]) & (key < self.end[..., None])


class Reach(NamedTuple):
    """The most tokens before and after itself that a query sees in any row (None: all). With it a
    kernel leaves out keys before it knows the row."""

    before: int | None = None
    after: int | None = None
    exact: bool = False
    """True where a query always sees itself and all tokens of its segment within the reach."""

    @property
    def causal(self) -> bool:
        """True where a query's keys end with itself."""
        return self.exact and self.after == 0

    def keys(self, start: int, end: int, num_keys: int) -> slice:
        """The keys that queries from `start` to `end` may see."""
        first = 0 if self.before is None else max(0, start - self.before)
        return slice(first, num_keys if self.after is None else min(num_keys, end + self.after))

    def meets(self, queries: range, keys: range) -> bool:
        """True if some of these queries may see some of these keys."""
        seen = self.keys(queries.start, queries.stop, keys.stop)
        return seen.start < keys.stop and seen.stop > keys.start

    def covers(self, queries: range, keys: range) -> bool:
        """True if all of these keys are near enough to all of these queries."""
        before, after = queries.stop - 1 - keys.start, keys.stop - 1 - queries.start
        near = self.before is None or before <= self.before
        return near and (self.after is None or after <= self.after)

    @property
    def metadata(self) -> dict[str, object]:
        """Entries of a kernel's metadata, which `planner.compiler.kernel_cost` reads."""
        if self.after == 0:
            return {} if self.before is None else {"window": self.before + 1}
        return {"reach": [self.before, self.after]}


def causal_reach(window: int | None) -> Reach:
    """The reach of `causal` intervals: `window` - 1 tokens before a query, none after."""
    return Reach(None if window is None else window - 1, 0, exact=True)


def both_ways_reach(reach: int | None = None) -> Reach:
    """The reach of `both_ways` intervals: `reach` tokens before a query and after."""
    return Reach(reach, reach, exact=True)


def blocks_reach(size: int) -> Reach:
    """The reach of `blocks` intervals: all tokens before a query, `size` - 1 after."""
    return Reach(after=size - 1)


def causal(segment_ids: Array, window: int | None = None) -> Interval:
    """Keys of the query's own segment [B, T] up to itself, of its last `window` tokens."""
    at = lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    new = segment_ids != jnp.roll(segment_ids, 1, axis=1)
    start = lax.cummax(jnp.where(new, at, 0), axis=1)
    return Interval(start if window is None else jnp.maximum(start, at + 1 - window), at + 1)


def both_ways(segment_ids: Array, reach: int | None = None) -> Interval:
    """Keys of the query's own segment, at most `reach` tokens before or after it."""
    window = None if reach is None else reach + 1
    behind = causal(segment_ids[:, ::-1], window).start[:, ::-1]
    return Interval(causal(segment_ids, window).start, segment_ids.shape[1] - behind)


def own_block(segment_ids: Array, size: int) -> Interval:
    """The block of the query: blocks of `size` tokens begin with their segment, and the last one
    may be shorter."""
    start, end = both_ways(segment_ids)
    at = lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    start = start + (at - start) // size * size
    return Interval(start, jnp.minimum(start + size, end))


def blocks(segment_ids: Array, size: int) -> Interval:
    """Keys of the query's own segment up to the end of its block (`own_block`)."""
    return Interval(both_ways(segment_ids).start, own_block(segment_ids, size).end)


def segments(seen: Interval) -> Array:
    """Ids [B, T] of the segments that intervals of an exact reach were made of: a query that sees
    nothing before itself begins one, or sees itself alone."""
    at = lax.broadcasted_iota(jnp.int32, seen.start.shape, 1)
    return jnp.cumsum(seen.start == at, axis=1, dtype=jnp.int32)


def in_place(seen: Interval) -> Interval:
    """The intervals with empty ones moved to their query, and all cut to the row, for kernels that
    visit what lies between the first and the last key of several queries."""
    at = lax.broadcasted_iota(jnp.int32, seen.start.shape, 1)
    start, end = jnp.maximum(seen.start, 0), jnp.minimum(seen.end, at.shape[1])
    some = start < end
    return Interval(jnp.where(some, start, at), jnp.where(some, end, at))


def zero_unseen(out: Array, seen: Interval) -> Array:
    """Results [B, T, N, H] of queries that see a key, zeros for others."""
    return jnp.where((seen.start < seen.end)[..., None, None], out, 0)


def attention(q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring) -> Array:
    """Attention of queries to the keys that they see, the reference of kernels that take intervals;
    shapes as in `masked_attention`. A query that sees none gives zeros."""
    return zero_unseen(masked_attention(q, k, v, seen.mask(k.shape[1]), scoring), seen)
