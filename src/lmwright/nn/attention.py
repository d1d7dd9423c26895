"""Softmax attention with grouped kv heads: the reference that every kernel equals."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

MASKED = -1e30  # finite: a fully masked row stays finite, and its loss weight is zero


class Scoring(NamedTuple):
    """Scale, window and soft cap with which products of queries and keys become scores."""

    scale: float
    window: int | None = None
    """Tokens that a query sees, itself included; None for all before it."""
    soft_cap: float | None = None
    """Bound c of the scores: s becomes c tanh(s / c) (https://arxiv.org/abs/2408.00118)."""

    def capped(self, scores: Array) -> Array:
        """Scores after the soft cap."""
        return self.capped_with_slope(scores)[0]

    def capped_with_slope(self, scores: Array) -> tuple[Array, Array | None]:
        """Scores after the soft cap, and the derivative of the soft cap (None without one)."""
        if self.soft_cap is None:
            return scores, None
        tanh = jnp.tanh(scores / self.soft_cap)
        return self.soft_cap * tanh, 1 - tanh**2


def masked_attention(
    q: Array, k: Array, v: Array, mask: Array, scoring: Scoring, sinks: Array | None = None
) -> Array:
    """softmax of the scores, times v, in float32 where mask [B, T, S] is True; a window is left to
    the mask. `sinks` [N] are scores of one more key of each head, whose value is zero.

    q [B, T, N, H]; k, v [B, S, K, H] with N a multiple of K; returns [B, T, N, H].
    """
    b, t, n, h = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(b, t, kv_heads, n // kv_heads, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scoring.capped(scores * scoring.scale), MASKED)
    if sinks is not None:
        one_more = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        one_more = jnp.broadcast_to(one_more, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, one_more], axis=-1)
    probs = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)  # [B, K, G, T, S]
    out = jnp.einsum("bkgts,bskh->btkgh", probs, v, preferred_element_type=jnp.float32)
    return out.reshape(b, t, n, h).astype(q.dtype)


def causal_mask(segment_ids: Array, window: int | None = None) -> Array:
    """bool [B, T, T]: not later than the query, of the same segment [B, T] and, if there is a
    window, among the query and the window - 1 tokens before it."""
    t = segment_ids.shape[-1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    seen = jnp.tril(jnp.ones((t, t), bool))
    if window is not None:
        seen &= ~jnp.tril(seen, -window)
    return same & seen


def causal_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring, sinks: Array | None = None
) -> Array:
    """Causal self-attention inside segments; shapes as in `masked_attention`, S = T."""
    return masked_attention(q, k, v, causal_mask(segment_ids, scoring.window), scoring, sinks)
