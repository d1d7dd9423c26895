"""The gated delta rule of whole rows, on each device's own rows and heads."""

from functools import partial

import jax.numpy as jnp
from jax import Array

from lmwright.core.sharding import by_shard, tensor_ways
from lmwright.nn import delta_rule as reference

GATES = "batch seq heads"


def delta_rule(
    q: Array, k: Array, v: Array, b: Array, g: Array, ids: Array, chunk_tokens: int
) -> Array:
    """`nn.delta_rule.delta_rule` over the mesh that is set. Left to the compiler, the memory that
    goes from chunk to chunk would be whole on every device."""
    if q.shape[2] % tensor_ways():
        q, k = (jnp.repeat(a, v.shape[2] // a.shape[2], axis=2) for a in (q, k))
    return by_shard(partial(_local, chunk_tokens), GATES, GATES)(v, q, k, ids, b, g)


def _local(chunk_tokens: int, v: Array, q: Array, k: Array, ids: Array, *gates: Array) -> Array:
    return reference.delta_rule(q, k, v, *gates, ids, chunk_tokens)
