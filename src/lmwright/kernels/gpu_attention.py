"""Attention on GPUs, on each device's own rows and heads: kernels in Triton from Ampere on
(`gpu_blocks`), XLA alone on earlier cards and for what these do not take (`gpu_chunks`).
"""

from jax import Array

from lmwright.core.sharding import by_shard
from lmwright.kernels import select
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach, causal, causal_reach

LEAST_BLOCK = 64  # tokens that must divide a row
MOST_HEAD_DIM = 256


def fits(length: int, head_dim: int, itemsize: int, interpret: bool = False) -> bool:
    """True for rows that the kernels take. Triton multiplies float32 without tensor cores, and
    compiles it for minutes: XLA is better there, but where the kernels are interpreted."""
    narrow = itemsize == 2 or interpret
    return length % LEAST_BLOCK == 0 and head_dim <= MOST_HEAD_DIM and narrow


def causal_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring, *,
    early: bool = False, interpret: bool = False,
) -> Array:  # fmt: skip
    """Causal attention, as `nn.attention.causal_attention`: q [B, T, N, H]; k, v [B, T, K, H]; ids
    [B, T]. `early` and `interpret` as in `attention`."""
    seen, reach = causal(segment_ids, scoring.window), causal_reach(scoring.window)
    return attention(q, k, v, seen, scoring, reach, early=early, interpret=interpret)


def attention(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach, *,
    early: bool = False, interpret: bool = False,
) -> Array:  # fmt: skip
    """Attention over intervals that all lie within `reach`, as `nn.intervals.attention`. `early`:
    the card has no kernels in Triton; `interpret` runs them without a card, for tests, in any
    dtype."""

    def local(q: Array, k: Array, v: Array, seen: Interval) -> Array:
        if not early and fits(q.shape[1], q.shape[3], q.dtype.itemsize, interpret):
            attend = select.KERNELS["gpu kernels"]
            return attend(q, k, v, seen, scoring, interpret=interpret)
        return select.KERNELS["gpu chunks"](q, k, v, seen, scoring, reach)

    return by_shard(local)(q, k, v, seen)
