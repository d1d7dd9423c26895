"""Causal attention for TPUs, on each device's own rows and heads: `tpu_row_attention` where rows
fit it, `tpu_long_attention` beyond, JAX's splash attention on v2 and v3.

    q [B, T, N, H], k v [B, T, K, H] --shard_map: batch, heads--> one Pallas kernel per row

Scores never leave the chip's vector memory, forward or backward; blocks that the mask hides
are skipped.
"""

from jax import Array

from lmwright.core.compute import LANES
from lmwright.core.sharding import by_shard
from lmwright.kernels import select, tpu_row_attention
from lmwright.nn import attention
from lmwright.nn.attention import Scoring

TILE = 16  # sublanes in bfloat16; our own kernels take heads that fill them
FUSED_LEN = 4096  # tokens; the fused backward keeps one partial dq for each block of keys


def fits(seq_len: int, early: bool = False) -> bool:
    """True if rows of this length divide into the kernel's blocks; v2 and v3 have no room for
    longer rows."""
    return seq_len % LANES == 0 and not (early and seq_len > FUSED_LEN)


def causal_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring,
    *, early: bool = False, interpret: bool = False,
) -> Array:  # fmt: skip
    """Causal attention, as `nn.attention.causal_attention`; rows of any length, or in `tpu_pieces`.

    `early` is for v2 and v3, whose kernels cannot multiply bfloat16 and have half the vector
    memory. `interpret` runs the kernel step by step on any platform, for tests.
    """
    tokens = segment_ids.shape[1]
    if not fits(tokens, early):
        return attention.causal_attention(q, k, v, segment_ids, scoring)

    def local(q: Array, k: Array, v: Array, ids: Array) -> Array:
        if not early and tpu_row_attention.fits(tokens, q.shape[3], q.dtype.itemsize):
            return tpu_row_attention.causal_attention(q, k, v, ids, scoring, interpret=interpret)
        if not early and q.shape[3] % TILE == 0:
            attend = select.KERNELS["tpu long attention"]
            return attend(q, k, v, ids, scoring, interpret=interpret)
        splash = select.KERNELS["splash attention"]
        return splash(q, k, v, ids, ids, scoring, early=early, interpret=interpret)

    return by_shard(local)(q, k, v, segment_ids)
