"""Attention of a few new tokens to all that are in a cache."""

import math
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.sharding import by_platform
from lmwright.nn import attention
from lmwright.nn.attention import MASKED, Scoring

CHUNK = 64  # keys that a core reads at a time


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
    """Attention for T = 1, chunk by chunk: CPUs turn keys and values around for their products,
    which then happens in the core's own memory. Chunks before the first key that is seen, and
    behind the last, are not read."""
    b, _, n, h = q.shape
    length, kv_heads = k.shape[1:3]
    grouped = q.reshape(b, kv_heads, n // kv_heads, h).astype(jnp.float32) * scoring.scale
    chunk = math.gcd(length, CHUNK)

    def add(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, out = carry
        keys, values, seen = (
            lax.dynamic_slice_in_dim(a, i * chunk, chunk, axis=1) for a in (k, v, mask[:, 0])
        )
        scores = jnp.einsum("bkgh,bskh->bkgs", grouped, keys.astype(jnp.float32))
        scores = jnp.where(seen[:, None, None], scoring.capped(scores), MASKED)
        new = jnp.maximum(largest, jnp.max(scores, axis=-1))
        probs = jnp.exp(scores - new[..., None])  # of a row that sees nothing: all alike, finite
        share = jnp.exp(largest - new)
        more = jnp.einsum("bkgs,bskh->bkgh", probs, values.astype(jnp.float32))
        return new, total * share + jnp.sum(probs, axis=-1), out * share[..., None] + more

    heads = b, kv_heads, n // kv_heads
    largest, total = jnp.full(heads, MASKED, jnp.float32), jnp.zeros(heads, jnp.float32)
    if sinks:
        largest = jnp.broadcast_to(sinks[0].astype(jnp.float32).reshape(heads[1:]), heads)
        total = jnp.ones_like(total)
    seen_by_one = jnp.any(mask[:, 0], axis=0)
    first = jnp.argmax(seen_by_one) // chunk
    last = -((jnp.argmax(seen_by_one[::-1]) - length) // chunk)
    empty = jnp.zeros((*heads, v.shape[-1]), jnp.float32)
    _, total, out = lax.fori_loop(first, last, add, (largest, total, empty))
    return (out / total[..., None]).reshape(b, 1, n, v.shape[-1]).astype(q.dtype)
