"""`tpu_row_attention` for intervals of keys: the same kernels, which visit the blocks within reach.

A row that fits the vector memory has few blocks, so segments are not looked up to leave some out,
and all blocks are masked.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from lmwright.kernels import tpu_row_attention
from lmwright.kernels.tpu_row_attention import Call, Ref, Sums, attend, dot
from lmwright.nn.attention import MASKED, Scoring
from lmwright.nn.intervals import Interval, Reach, zero_unseen


class Row(NamedTuple):
    """A row as in `tpu_row_attention.Row`, whose queries see intervals."""

    size: int
    count: int
    scoring: Scoring
    start: Ref
    """Starts of the intervals, int32 [1, T]."""
    end: Ref
    reach: Reach

    at = tpu_row_attention.Row.at

    def _blocks(self, of: Array, before: int | None, after: int | None) -> tuple[Any, Any]:
        """(first, end) of the blocks that lie up to `before` tokens before and `after` tokens
        after."""
        first, end = 0, self.count
        if before is not None:
            first = lax.div(jnp.maximum(0, of * self.size - before), self.size)
        if after is not None:
            last = lax.div((of + 1) * self.size - 1 + after, self.size)
            end = jnp.minimum(end, last + 1)
        return first, end

    def over_keys(self, queries: Array, some: Any, none: Sums) -> Sums:
        """Sums after the blocks of keys that a block of queries sees."""
        first, end = self._blocks(queries, self.reach.before, self.reach.after)
        return lax.fori_loop(first, end, some, none)

    def over_queries(self, keys: Array, some: Any) -> None:
        """Runs `some` on the blocks of queries that see a block of keys."""
        first, end = self._blocks(keys, self.reach.after, self.reach.before)
        lax.fori_loop(first, end, some, None)

    def scores(
        self, k: Array, q: Array, keys: Array, queries: Array, diagonal: bool
    ) -> tuple[Array, Array | None]:
        """Masked float32 [keys, queries] of scaled k [keys, H] and q [H, queries], and the
        derivative of the soft cap (None without one)."""
        scores, slope = self.scoring.capped_with_slope(dot(k, q))
        start, end = (
            side[:, self.at(queries)] - keys * self.size for side in (self.start, self.end)
        )
        key = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        return jnp.where((key >= start) & (key < end), scores, MASKED), slope


@dataclass(frozen=True)
class IntervalCall(Call):
    """Arguments of both kernels."""

    reach: Reach

    def row(self, *blocks: Any) -> Row:
        return Row(*blocks, self.reach)

    @property
    def metadata(self) -> dict[str, object]:
        return self.reach.metadata

    def marks(self, start: Array, end: Array) -> list[tuple[Array, pl.BlockSpec]]:
        whole = pl.BlockSpec((None, 1, start.shape[1]), lambda b, *_: (b, 0, 0))
        return [(start[:, None], whole), (end[:, None], whole)]


def attention(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach,
    *, interpret: bool = False,
) -> Array:  # fmt: skip
    """Attention over intervals that lie within `reach`, as `nn.intervals.attention`, of one
    device's own rows, for which `tpu_row_attention.fits` holds."""
    q, k, v = (a.transpose(0, 2, 3, 1) for a in (q, k, v))  # [B, N, H, T]
    call = IntervalCall(scoring, interpret, reach)
    out = attend(call, q, k, v, tuple(seen)).transpose(0, 3, 1, 2)
    return out if reach.exact else zero_unseen(out, seen)
