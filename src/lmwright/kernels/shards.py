"""Attention on each device's own rows, tokens and heads."""

from collections.abc import Callable

import jax
from jax import Array

from lmwright.core.sharding import ACTIVATIONS, partition


def by_shard(local: Callable[..., Array]) -> Callable[..., Array]:
    """`local(q, k, v, segment_ids)` run by every device of the mesh on what it holds of
    q [B, T, N, H], k and v [B, T, K, H] and ids [B, T]."""
    spec = lambda axes: partition(tuple(axes.split()), ACTIVATIONS)  # noqa: E731
    heads, kv_heads = spec("batch seq heads head_dim"), spec("batch seq kv_heads head_dim")
    return jax.shard_map(
        local,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=(heads, kv_heads, kv_heads, spec("batch seq")),
        out_specs=heads,
        check_vma=False,
    )
