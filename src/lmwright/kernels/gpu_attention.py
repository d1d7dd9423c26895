"""Attention on GPUs, on each device's own rows and heads, by the first that takes the call:

gpu_cudnn       cuDNN's, where a row is one document (`data.pack.attention = "row"`)
gpu_blocks      ours in Triton, of packed rows with heads up to 64 on Hopper
gpu_tokamax     tokamax's kernels in Mosaic, on Hopper and Blackwell
gpu_blocks      ours in Triton, from Ampere on
gpu_chunks      XLA alone
"""

from typing import Literal

from jax import Array

from lmwright.core.sharding import by_shard, device_kind
from lmwright.kernels import gpu_cudnn, gpu_tokamax, select
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach, causal, causal_reach

LEAST_BLOCK = 64  # tokens that must divide a row
MOST_HEAD_DIM = 256
MOST_PACKED_HEAD_DIM = 64  # of heads that were measured

Name = Literal["cudnn", "tokamax", "kernels", "chunks"]
NAMES: dict[Name, str] = {
    "cudnn": "cuDNN", "tokamax": "tokamax", "kernels": "our kernels in Triton",
    "chunks": "XLA, some queries at a time",
}  # fmt: skip
"""Names for people."""

_taken: dict[Name, None] = {}


def taken() -> str:
    """Names for people of what computes attention in the programs that this process traced."""
    return ", ".join(NAMES[name] for name in _taken)


def fits(length: int, head_dim: int, itemsize: int, interpret: bool = False) -> bool:
    """True for rows that our kernels take. Triton multiplies float32 without tensor cores, and
    compiles it for minutes: XLA is better there, but where the kernels are interpreted."""
    narrow = itemsize == 2 or interpret
    return length % LEAST_BLOCK == 0 and head_dim <= MOST_HEAD_DIM and narrow


def name_for(
    q: Array, k: Array, scoring: Scoring, reach: Reach, *,
    early: bool = False, one_document: bool = False, interpret: bool = False,
) -> Name:  # fmt: skip
    """The name of what computes these shapes on the mesh's devices; arguments as of `attention`."""
    if one_document and not (early or interpret) and gpu_cudnn.fits(q, scoring, reach):
        return "cudnn"
    if early or not fits(q.shape[1], q.shape[3], q.dtype.itemsize, interpret):
        return "chunks"
    # ours skip all of another document, which on Hopper makes up for the faster products of tokamax
    packed = not one_document and q.shape[3] <= MOST_PACKED_HEAD_DIM
    if interpret or (packed and gpu_tokamax.is_hopper(device_kind())):
        return "kernels"
    return "tokamax" if gpu_tokamax.fits(q, k, scoring, device_kind()) else "kernels"


def causal_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring, *,
    early: bool = False, one_document: bool = False, interpret: bool = False,
) -> Array:  # fmt: skip
    """Causal attention, as `nn.attention.causal_attention`: q [B, T, N, H]; k, v [B, T, K, H]; ids
    [B, T]. Other arguments as in `attention`."""
    seen, reach = causal(segment_ids, scoring.window), causal_reach(scoring.window)
    return attention(
        q, k, v, seen, scoring, reach,
        early=early, one_document=one_document, interpret=interpret,
    )  # fmt: skip


def attention(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach, *,
    early: bool = False, one_document: bool = False, interpret: bool = False,
) -> Array:  # fmt: skip
    """Attention over intervals that all lie within `reach`, as `nn.intervals.attention`. `early`:
    the card is older than Ampere; `one_document`: each row is one; `interpret` runs our kernels
    without a card, for tests, in any dtype."""

    def local(q: Array, k: Array, v: Array, seen: Interval) -> Array:
        name = name_for(
            q, k, scoring, reach, early=early, one_document=one_document, interpret=interpret
        )
        _taken[name] = None
        if name == "cudnn":
            return gpu_cudnn.attention(q, k, v, scoring, reach)
        if name == "tokamax":
            return gpu_tokamax.attention(q, k, v, seen, scoring, reach)
        if name == "kernels":
            return select.KERNELS["gpu kernels"](q, k, v, seen, scoring, reach, interpret=interpret)
        return select.KERNELS["gpu chunks"](q, k, v, seen, scoring, reach)

    return by_shard(local)(q, k, v, seen)
