"""Softmax attention with grouped kv heads: the reference that every kernel equals."""

import jax
import jax.numpy as jnp
from jax import Array

MASKED = -1e30  # finite: a fully masked row stays finite, and its loss weight is zero


def masked_attention(q: Array, k: Array, v: Array, mask: Array, scale: float) -> Array:
    """softmax(q k^T scale) v in float32 where mask [B, T, S] is True.

    q [B, T, N, H]; k, v [B, S, K, H] with N a multiple of K; returns [B, T, N, H].
    """
    b, t, n, h = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(b, t, kv_heads, n // kv_heads, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * scale, MASKED)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)  # [B, K, G, T, S]
    out = jnp.einsum("bkgts,bskh->btkgh", probs, v, preferred_element_type=jnp.float32)
    return out.reshape(b, t, n, h).astype(q.dtype)


def causal_mask(segment_ids: Array) -> Array:
    """bool [B, T, T]: not later than the query, and of the same segment [B, T]."""
    t = segment_ids.shape[-1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return same & jnp.tril(jnp.ones((t, t), bool))


def causal_attention(q: Array, k: Array, v: Array, segment_ids: Array, scale: float) -> Array:
    """Causal self-attention inside segments; shapes as in `masked_attention`, S = T."""
    return masked_attention(q, k, v, causal_mask(segment_ids), scale)
