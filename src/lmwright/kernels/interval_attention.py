"""Attention to intervals of keys (`nn.intervals`), by the kernels of each platform.

attend(q [B, T, N, H], k v [B, T, K, H], seen [B, T], scoring, reach) -> [B, T, N, H]

              whole rows on a device               rows cut over `context`
reference     nn.intervals                         a ring of its own, or all-to-all around
CPU           cpu_attention                        what computes whole rows
GPU           gpu_attention
TPU           tpu_interval_attention
"""

from collections.abc import Callable
from functools import partial

from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.sharding import context_ways
from lmwright.kernels.select import KERNELS, attention_of
from lmwright.nn import intervals
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach

Attend = Callable[[Array, Array, Array, Interval, Scoring, Reach], Array]


def attend_by(compute: Compute) -> Attend:
    """The `attend` function of these settings."""
    whole = _whole_rows(compute)
    if context_ways() == 1:
        return whole
    if compute.context_attention == "ring":
        return KERNELS["ring of intervals"]
    return partial(KERNELS["all-to-all of intervals"], whole)


def both_ways_by(compute: Compute) -> Callable[..., Array]:
    """`attend(q, k, v, segment_ids, scoring)` to the tokens of a query's segment on both sides;
    with a window w, to those that are less than w away."""
    attend = attend_by(compute)

    def run(q: Array, k: Array, v: Array, ids: Array, scoring: Scoring) -> Array:
        reach = both_ways_within(scoring.window)
        seen = intervals.both_ways(ids, reach.before)
        return attend(q, k, v, seen, scoring._replace(window=None), reach)

    return run


def both_ways_within(window: int | None) -> Reach:
    """The reach of tokens that are less than `window` away on either side; without a window, of
    all."""
    return intervals.both_ways_reach(None if window is None else window - 1)


def _whole_rows(compute: Compute) -> Attend:
    if compute.kernels == "reference":
        return reference
    return attention_of(compute, "attention of intervals")


def reference(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach
) -> Array:
    """`nn.intervals.attention`, which also computes what is out of reach."""
    return intervals.attention(q, k, v, seen, scoring)
