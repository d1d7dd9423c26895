"""Attention for GPUs by XLA alone: scores of a few queries exist at a time, so that memory grows
with the tokens and not with their square.

    for each chunk of queries, with n keys:          those out of its reach do not exist
        for 512 queries of it:  scores [B, K, G, 512, n] -> probabilities -> out

Products are those of the operands' dtype with float32 sums. The backward pass computes scores again
from the log of the softmax sum, as in FlashAttention (https://arxiv.org/abs/2205.14135).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.kernels.online_softmax import (
    along,
    finished,
    grouped,
    named,
    no_sums,
    pair_gradients,
    softmax_sums,
    ungrouped,
)
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach, zero_unseen

MIN_CHUNK = 512  # queries
MAX_CHUNKS = 8  # each is unrolled, so they cost compile time


def attention(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach
) -> Array:
    """Attention over intervals that all lie within `reach`, as `nn.intervals.attention`, of one
    device's own rows."""
    out = ungrouped(_attention(scoring, reach, grouped(q, k.shape[2]), k, v, seen))
    return out if reach.exact else zero_unseen(out, seen)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen: Interval
) -> Array:
    """Attention of q [B, K, G, T, H] to k, v [B, T, K, H]; the result has the shape of q."""
    return _forward(scoring, reach, q, k, v, seen)[0]


def _chunks(reach: Reach, length: int) -> Iterator[tuple[slice, slice]]:
    """Queries of each chunk, and the keys that they may see."""
    size = max(MIN_CHUNK, -(-length // MAX_CHUNKS // MIN_CHUNK) * MIN_CHUNK)
    for start in range(0, length, size):
        end = min(start + size, length)
        yield slice(start, end), reach.keys(start, end, length)


def _forward(scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen: Interval):
    parts = []
    for at, keys in _chunks(reach, q.shape[3]):
        some, places = q[:, :, :, at] * scoring.scale, Interval(seen.start[:, at], seen.end[:, at])
        some_keys = (k[:, keys], v[:, keys], keys.start)
        sums = softmax_sums(scoring, (some, places), some_keys, no_sums(some.shape))
        parts.append(finished(sums, q.dtype))
    out, log_sums = named(*(jnp.concatenate(a, axis=3) for a in zip(*parts, strict=True)))
    return out, (q, k, v, seen, out, log_sums)


def _backward(scoring: Scoring, reach: Reach, residuals: tuple[Any, ...], g: Array):
    q, k, v, seen, out, log_sums = residuals
    inner = along(out, g)
    g = g.astype(q.dtype)
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for at, keys in _chunks(reach, q.shape[3]):
        arrays = [a[:, :, :, at] for a in (q, g, inner, log_sums)]
        places = Interval(seen.start[:, at], seen.end[:, at])
        some_keys = (k[:, keys], v[:, keys], keys.start)
        new_dq, new_dk, new_dv = pair_gradients(scoring, (*arrays, places), some_keys)
        dq.append(new_dq.astype(q.dtype))
        dk, dv = dk.at[:, keys].add(new_dk), dv.at[:, keys].add(new_dv)
    return jnp.concatenate(dq, axis=3), dk.astype(k.dtype), dv.astype(v.dtype), None


_attention.defvjp(_forward, _backward)
