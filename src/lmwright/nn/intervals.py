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

    def num_scores(self) -> Array:
        """The work that counts: scores of each row, int32 [B]."""
        return jnp.sum(jnp.maximum(self.end - self.start, 0), axis=-1)


class Reach(NamedTuple):
    """The most tokens before and after itself that a query sees in any row (None: all), by which a
    kernel leaves out keys before it knows the row."""

    before: int | None = None
    after: int | None = None

    def keys(self, start: int, end: int, num_keys: int) -> slice:
        """Those that queries from `start` to `end` may see."""
        first = 0 if self.before is None else max(0, start - self.before)
        return slice(first, num_keys if self.after is None else min(num_keys, end + self.after))


def causal_reach(window: int | None) -> Reach:
    """That of `causal`."""
    return Reach(None if window is None else window - 1, 0)


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


def blocks(segment_ids: Array, size: int) -> Interval:
    """Keys of the query's own segment up to the end of its block; blocks of `size` tokens begin
    with their segment, and the last one may be shorter."""
    start, end = both_ways(segment_ids)
    at = lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    return Interval(start, jnp.minimum(end, start + ((at - start) // size + 1) * size))


def attention(q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring) -> Array:
    """Attention of queries to the keys that they see, the reference of kernels that take intervals;
    shapes as in `masked_attention`. A query that sees none gives zeros."""
    out = masked_attention(q, k, v, seen.mask(k.shape[1]), scoring)
    return jnp.where((seen.start < seen.end)[..., None, None], out, 0)
