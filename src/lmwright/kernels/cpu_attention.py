"""Causal attention for CPUs: a few (row, kv head) at a time, so that scores stay in cache.

    for each (b, k):  q [G, T, H], k v [T, H], segment ids [T]    (vectorized over some k)
      for each chunk of C queries, ending at n:        keys after the chunk do not exist
        scores [G C, n] -> probabilities -> out [G C, H]

The backward pass keeps the log of the softmax sum and computes scores again, as in
FlashAttention (https://arxiv.org/abs/2205.14135). Arithmetic is float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from lmwright.core.compute import ATTENTION
from lmwright.core.cpu import product
from lmwright.nn.attention import MASKED, Scoring

MIN_CHUNK = 128  # queries; shorter ones make the matmuls too thin
MAX_CHUNKS = 8  # each is unrolled, so they cost compile time
CACHE_BYTES = 4 << 20  # scores that may exist at once


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def causal_attention(q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring) -> Array:
    """As `nn.attention.causal_attention`: q [B, T, N, H]; k, v [B, T, K, H]; ids [B, T]."""
    return _fwd(q, k, v, segment_ids, scoring)[0]


def _chunks(t: int) -> list[tuple[int, int]]:
    """(start, end) of the query chunks of a row."""
    size = max(MIN_CHUNK, -(-t // MAX_CHUNKS))
    return [(start, min(start + size, t)) for start in range(0, t, size)]


def _together(q: Array, kv_heads: int) -> int:
    """Number of kv heads that go through the loop at once: one alone leaves cores idle."""
    _, t, n, _ = q.shape
    start, end = _chunks(t)[0]
    head_bytes = 4 * (n // kv_heads) * (end - start) * t
    fitting = [
        p for p in range(1, kv_heads + 1) if kv_heads % p == 0 and p * head_bytes <= CACHE_BYTES
    ]
    return max(fitting, default=1)


def _split(x: Array, kv_heads: int) -> Array:
    """[B, T, K G, H] to float32 [B K, G, T, H]."""
    b, t, n, h = x.shape
    x = x.reshape(b, t, kv_heads, n // kv_heads, h).transpose(0, 2, 3, 1, 4)
    return x.reshape(b * kv_heads, n // kv_heads, t, h).astype(jnp.float32)


def _join(x: Array, kv_heads: int, like: Array) -> Array:
    """The inverse of `_split`, in the dtype of `like`."""
    _, g, t, h = x.shape
    x = x.reshape(-1, kv_heads, g, t, h).transpose(0, 3, 1, 2, 4)
    return x.reshape(-1, t, kv_heads * g, h).astype(like.dtype)


def _first_key(start: int, scoring: Scoring) -> int:
    """The first key that any query of a chunk may look at."""
    return 0 if scoring.window is None else max(0, start - scoring.window + 1)


def _hidden(ids: Array, start: int, end: int, scoring: Scoring) -> Array:
    """bool [C, n], True where a query of the chunk must not look."""
    first = _first_key(start, scoring)
    query = start + lax.broadcasted_iota(jnp.int32, (end - start, end - first), 0)
    key = first + lax.broadcasted_iota(jnp.int32, (end - start, end - first), 1)
    hidden = (query < key) | (ids[start:end, None] != ids[None, first:end])
    return hidden if scoring.window is None else hidden | (query - key >= scoring.window)


def _scores(q: Array, k: Array, ids: Array, scoring: Scoring, start: int, end: int):
    """Scaled queries [G C, H] and masked scores [G, C, n] of one chunk, and the derivative of the
    soft cap (None without one)."""
    g, _, h = q.shape
    scaled = (q[:, start:end] * scoring.scale).reshape(-1, h)
    keys = k[_first_key(start, scoring) : end]
    scores = product(scaled, keys, 1, 1).reshape(g, end - start, keys.shape[0])
    scores, slope = scoring.capped_with_slope(scores)
    return scaled, jnp.where(_hidden(ids, start, end, scoring), MASKED, scores), slope


def _fwd(q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring):
    out, log_sums = over_rows(partial(_outputs, scoring))(q, k, v, segment_ids)
    out = checkpoint_name(out, ATTENTION)
    log_sums = checkpoint_name(log_sums, ATTENTION)
    return out, (q, k, v, segment_ids, out, log_sums)


def _outputs(scoring: Scoring, q: Array, k: Array, v: Array, segment_ids: Array):
    """[B, T, N, H], and the logs of the softmax sums [B K, G, T]."""
    kv_heads = k.shape[2]

    def one(operands: tuple[Array, ...]) -> tuple[Array, Array]:
        # the barrier ends the slicing of the loop's inputs here, not inside each fusion
        q, k, v, ids = lax.optimization_barrier(operands)
        k, v = k[0], v[0]
        outs, sums = [], []
        for start, end in _chunks(q.shape[1]):
            _, scores, _ = _scores(q, k, ids, scoring, start, end)
            top = jnp.max(scores, axis=-1, keepdims=True)
            probs = jnp.exp(scores - top)
            total = jnp.sum(probs, axis=-1, keepdims=True)
            seen = v[_first_key(start, scoring) : end]
            out = product(probs.reshape(-1, seen.shape[0]), seen, 1, 0)  # [G C, H]
            outs.append(out.reshape(*probs.shape[:2], -1) / total)
            sums.append((top + jnp.log(total))[..., 0])
        return jnp.concatenate(outs, axis=1), jnp.concatenate(sums, axis=1)

    ids = jnp.repeat(segment_ids, kv_heads, axis=0)
    loop = (*(_split(a, kv_heads) for a in (q, k, v)), ids)
    out, log_sums = lax.map(one, loop, batch_size=_together(q, kv_heads))
    return _join(out, kv_heads, q), log_sums


def _bwd(scoring: Scoring, residuals: tuple[Array, ...], g_out: Array):
    return *over_rows(partial(_gradients, scoring))(*residuals, g_out), None


def _gradients(scoring: Scoring, q, k, v, segment_ids, out, log_sums, g_out):
    """Those of q, k and v."""
    kv_heads = k.shape[2]

    def one(operands: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        q, k, v, ids, log_sums, out, g_out = lax.optimization_barrier(operands)
        k, v = k[0], v[0]
        inner = jnp.sum(out * g_out, axis=-1)  # [G, T]
        dq, dk, dv = [], jnp.zeros_like(k.T), jnp.zeros_like(v.T)  # [H, T]: matmuls like it
        for start, end in _chunks(q.shape[1]):
            at = slice(_first_key(start, scoring), end)
            scaled, scores, slope = _scores(q, k, ids, scoring, start, end)
            probs = jnp.exp(scores - log_sums[:, start:end, None]).reshape(scaled.shape[0], -1)
            g = g_out[:, start:end].reshape(-1, q.shape[2])  # [G C, H]
            dv = dv.at[:, at].add(product(g, probs, 0, 0))
            dprobs = product(g, v[at], 1, 1)
            dscores = probs * (dprobs - inner[:, start:end].reshape(-1, 1))
            if slope is not None:
                dscores *= slope.reshape(dscores.shape)
            dk = dk.at[:, at].add(product(scaled, dscores, 0, 0))
            dq_chunk = product(dscores, k[at], 1, 0) * scoring.scale
            dq.append(dq_chunk.reshape(q.shape[0], -1, q.shape[2]))
        return jnp.concatenate(dq, axis=1), dk.T[None], dv.T[None]

    ids = jnp.repeat(segment_ids, kv_heads, axis=0)
    split = partial(_split, kv_heads=kv_heads)
    loop = (split(q), split(k), split(v), ids, log_sums, split(out), split(g_out))
    dq, dk, dv = lax.map(one, loop, batch_size=_together(q, kv_heads))
    return tuple(_join(a, kv_heads, like) for a, like in ((dq, q), (dk, k), (dv, v)))


causal_attention.defvjp(_fwd, _bwd)


def over_rows(rows_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`rows_fn`, whose arrays all begin with rows that never see each other, such that a `vmap`
    around it takes the rows of all lanes at once: to the compiler it is one batch, of the same
    loops and products. Not to be differentiated; it belongs inside rules that are."""
    whole = jax.custom_batching.custom_vmap(rows_fn)

    @whole.def_vmap
    def lanes(num: int, mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
        arrays = tuple(
            a if is_mapped else jnp.broadcast_to(a, (num, *a.shape))
            for a, is_mapped in zip(arrays, mapped, strict=True)
        )
        out = whole(*(a.reshape(-1, *a.shape[2:]) for a in arrays))
        out = jax.tree.map(lambda a: a.reshape(num, -1, *a.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return whole
