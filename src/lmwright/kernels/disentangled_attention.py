"""Disentangled attention by the kernels of each platform; signature of `nn.disentangled.attention`.

CPU                cpu_disentangled
TPU from v4 on     tpu_disentangled, on each device's own rows and heads, where rows fit it
everything else    nn.disentangled, which holds the scores of all pairs of tokens
"""

from collections.abc import Callable
from typing import Any

from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.sharding import by_shard
from lmwright.kernels import cpu_disentangled, tpu_disentangled
from lmwright.nn import disentangled
from lmwright.nn.disentangled import Disentangled


def attend_by(compute: Compute) -> Callable[..., Array]:
    """The attention function of these settings, for whole rows on a device."""
    kernels = {"cpu": cpu_disentangled.attention, "tpu": on_tpu}
    return kernels.get(compute.kernels, disentangled.attention)


def on_tpu(
    q: Array, k: Array, v: Array, position_keys: Array, position_queries: Array,
    segment_ids: Array, scoring: Disentangled, *, interpret: Any = False,
) -> Array:  # fmt: skip
    """Disentangled attention, as `nn.disentangled.attention`; `interpret` runs the kernel step by
    step on any platform."""
    if not tpu_disentangled.fits(q.shape[1], q.shape[3], q.dtype.itemsize):
        return disentangled.attention(
            q, k, v, position_keys, position_queries, segment_ids, scoring
        )

    def local(q: Array, k: Array, v: Array, ids: Array, pk: Array, pq: Array) -> Array:
        return tpu_disentangled.attention(q, k, v, pk, pq, ids, scoring, interpret=interpret)

    heads = "distances heads head_dim"
    return by_shard(local, heads, heads)(q, k, v, segment_ids, position_keys, position_queries)
