"""The gated delta rule of whole rows, on each device's own rows and heads."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array

from lmwright.core.sharding import by_shard, tensor_ways
from lmwright.nn import delta_rule as reference

GATES = "batch seq heads"


def delta_rule(
    q: Array, k: Array, v: Array, b: Array, g: Array, ids: Array, chunk_tokens: int,
    *, recomputed: bool = False,
) -> Array:  # fmt: skip
    """`nn.delta_rule.delta_rule` over the mesh that is set. Left to the compiler, the memory that
    goes from chunk to chunk would be whole on every device. What is `recomputed` with its layer
    keeps what it needs by itself."""
    if q.shape[2] % tensor_ways():
        q, k = (jnp.repeat(a, v.shape[2] // a.shape[2], axis=2) for a in (q, k))
    rule = reference.from_empty if recomputed else reference.delta_rule
    return by_shard(partial(_local, rule, chunk_tokens), GATES, GATES)(v, q, k, ids, b, g)


def _local(
    rule: Callable[..., Array], chunk_tokens: int, v: Array, q: Array, k: Array, ids: Array,
    *gates: Array,
) -> Array:  # fmt: skip
    return rule(q, k, v, *gates, ids, chunk_tokens)
