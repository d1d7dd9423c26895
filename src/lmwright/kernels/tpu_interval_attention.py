"""Attention to intervals of keys on TPUs, on each device's own rows and heads: `tpu_row_intervals`
where rows fit the vector memory, `tpu_long_attention` beyond. Intervals of an exact reach go to
JAX's splash kernel on v2 and v3, and for heads that do not fill tiles.
"""

from typing import Any

from jax import Array

from lmwright.core.sharding import by_shard
from lmwright.kernels import (
    tpu_attention,
    tpu_long_attention,
    tpu_row_attention,
    tpu_row_intervals,
    tpu_spans,
    tpu_splash,
)
from lmwright.nn import intervals
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach


def attention(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach,
    *, early: bool = False, interpret: Any = False,
) -> Array:  # fmt: skip
    """Attention over intervals that lie within `reach`, as `nn.intervals.attention`; it also takes
    what no kernel does. `early` and `interpret` as in `tpu_attention.causal_attention`."""
    t, size = q.shape[1], q.shape[3]

    def local(q: Array, k: Array, v: Array, seen: Interval) -> Array:
        ours = not early and tpu_spans.fits(t, size)
        if ours and tpu_row_attention.fits(t, size, q.dtype.itemsize):
            kernel = tpu_row_intervals.attention
            return kernel(q, k, v, seen, scoring, reach, interpret=interpret)
        if ours:
            kernel = tpu_long_attention.attention
            return kernel(q, k, v, seen, scoring, reach, interpret=interpret)
        if not (reach.exact and tpu_attention.fits(t, early)):
            return intervals.attention(q, k, v, seen, scoring)
        ids, before = intervals.segments(seen), reach.before
        near = scoring._replace(window=None if before is None else before + 1)
        return tpu_splash.splash_attention(
            q, k, v, ids, ids, near, early=early, interpret=interpret, after=reach.after
        )

    return by_shard(local)(q, k, v, seen)
