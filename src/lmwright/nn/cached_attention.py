"""Attention of a few new tokens to all that are in a cache."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.sharding import by_platform
from lmwright.nn import attention
from lmwright.nn.attention import MASKED, Scoring


def cached_attention(
    q: Array, k: Array, v: Array, mask: Array, scoring: Scoring, *sinks: Array
) -> Array:
    """`attention.masked_attention` for a few queries at the end of many keys."""

    def general(q: Array, k: Array, v: Array, mask: Array, *sinks: Array) -> Array:
        return attention.masked_attention(q, k, v, mask, scoring, *sinks)

    if q.shape[1] > 1:
        return general(q, k, v, mask, *sinks)
    one_query = partial(_one_query, scoring=scoring)
    return by_platform(q, k, v, mask, *sinks, cpu=one_query, default=general)


def _one_query(q: Array, k: Array, v: Array, mask: Array, *sinks: Array, scoring: Scoring) -> Array:
    """Attention for T = 1 without matrix products, for which CPUs would transpose keys and values
    first."""
    b, _, n, h = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(b, 1, kv_heads, n // kv_heads, h).astype(jnp.float32) * scoring.scale
    keys, values = (a[:, :, :, None].astype(jnp.float32) for a in (k, v))  # [B, S, K, 1, H]
    scores = jnp.sum(grouped * keys, axis=-1)  # [B, S, K, G]
    scores = jnp.where(mask[:, 0, :, None, None], scoring.capped(scores), MASKED)
    for each in sinks:
        one_more = each.astype(jnp.float32).reshape(1, 1, kv_heads, -1)
        one_more = jnp.broadcast_to(one_more, (b, *one_more.shape[1:]))
        scores = jnp.concatenate([scores, one_more], axis=1)
    probs = lax.optimization_barrier(jax.nn.softmax(scores, axis=1)[:, : k.shape[1]])
    out = jnp.sum(probs[..., None] * values, axis=1)  # [B, K, G, H]
    return out.reshape(b, 1, n, h).astype(q.dtype)
