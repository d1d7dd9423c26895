"""Attention for CPUs: a few (row, kv head) at a time, so that scores stay in cache.

    for each (b, k):  q [G, T, H], k v [T, H], intervals [T]      (vectorized over some k)
      for each chunk of queries, with n keys:          those out of its reach do not exist
        for each C queries of it:                      all of them, unless the row is long
          scores [G C, n] -> probabilities -> out [G C, H]

The backward pass keeps the log of the softmax sum and computes scores again, as in
FlashAttention (https://arxiv.org/abs/2205.14135). Arithmetic is float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from lmwright.core.compute import ATTENTION
from lmwright.core.cpu import product
from lmwright.nn.attention import MASKED, Scoring
from lmwright.nn.intervals import Interval, Reach, causal, causal_reach

MIN_CHUNK = 128  # queries; shorter ones make the matmuls too thin
MAX_CHUNKS = 8  # each is unrolled, so they cost compile time
CACHE_BYTES = 4 << 20  # scores that may exist at once
LOOP_BYTES = 64 << 20  # scores of one chunk; of longer rows it is a loop


def causal_attention(q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring) -> Array:
    """Causal attention, as `nn.attention.causal_attention`: q [B, T, N, H]; k, v [B, T, K, H]; ids
    [B, T]."""
    seen, reach = causal(segment_ids, scoring.window), causal_reach(scoring.window)
    return attention(q, k, v, seen, scoring, reach)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attention(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach
) -> Array:
    """Attention over intervals that all lie within `reach`, as `nn.intervals.attention`."""
    return _fwd(q, k, v, seen, scoring, reach)[0]


def _chunks(t: int) -> list[tuple[int, int]]:
    """(start, end) of the query chunks of a row."""
    size = max(MIN_CHUNK, -(-t // MAX_CHUNKS))
    return [(start, min(start + size, t)) for start in range(0, t, size)]


def _steps(g: int, size: int, keys: int) -> int:
    """Number of steps in which a chunk of `size` queries is computed."""
    for steps in range(1, size // MIN_CHUNK + 1):
        if size % steps == 0 and 4 * g * (size // steps) * keys <= LOOP_BYTES:
            return steps
    return 1


def _over_queries(
    step: Callable[..., Any], carry: Any, start: int, end: int, keys: int, *arrays: Array
) -> tuple[Any, Any]:
    """Carry and outputs [G, end - start, ...] of `step(carry, pieces)` over the queries of a
    chunk; arrays and outputs have queries along axis 1."""
    steps = _steps(arrays[0].shape[0], end - start, keys)
    pieces = [a[:, start:end] for a in arrays]
    if steps == 1:
        return step(carry, pieces)
    size = (end - start) // steps
    split = lambda a: jnp.moveaxis(a.reshape(a.shape[0], steps, size, *a.shape[2:]), 1, 0)  # noqa: E731
    join = lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:])  # noqa: E731
    carry, outs = lax.scan(step, carry, tuple(map(split, pieces)))
    return carry, jax.tree.map(join, outs)


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


def _scores(q: Array, k: Array, start: Array, end: Array, at: int, scoring: Scoring):
    """Scaled queries [G C, H] and masked scores [G, C, n] of queries [G, C, H], which see keys from
    `start` to `end` [1, C] of the row, for keys [n, H] that begin at `at`; and the derivative of
    the soft cap (None without one)."""
    g, size, h = q.shape
    scaled = (q * scoring.scale).reshape(-1, h)
    scores = product(scaled, k, 1, 1).reshape(g, size, k.shape[0])
    scores, slope = scoring.capped_with_slope(scores)
    key = at + lax.broadcasted_iota(jnp.int32, scores.shape[1:], 1)
    hidden = (key < start[0, :, None]) | (key >= end[0, :, None])
    return scaled, jnp.where(hidden, MASKED, scores), slope


def _fwd(q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach):
    out, log_sums = over_rows(partial(outputs, scoring, reach))(q, k, v, *seen)
    out = checkpoint_name(out, ATTENTION)
    log_sums = checkpoint_name(log_sums, ATTENTION)
    return out, (q, k, v, *seen, out, log_sums)


def outputs(
    scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen_from: Array, seen_to: Array
):
    """[B, T, N, H], and the logs of the softmax sums [B K, G, T]."""
    kv_heads = k.shape[2]

    def one(operands: tuple[Array, ...]) -> tuple[Array, Array]:
        # the barrier ends the slicing of the loop's inputs here, not inside each fusion
        q, k, v, *seen = lax.optimization_barrier(operands)
        k, v = k[0], v[0]
        chunks = []
        for start, end in _chunks(q.shape[1]):
            at = reach.keys(start, end, k.shape[0])
            chunk, queries = partial(step, k[at], v[at], at.start), (q, *(a[None] for a in seen))
            chunks.append(_over_queries(chunk, None, start, end, at.stop - at.start, *queries)[1])
        outs, sums = zip(*chunks, strict=True)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(sums, axis=1)

    def step(k: Array, v: Array, at: int, _: None, queries: Sequence[Array]):
        q, *seen = queries
        _, scores, _ = _scores(q, k, *seen, at, scoring)
        top = jnp.max(scores, axis=-1, keepdims=True)
        probs = jnp.exp(scores - top)
        total = jnp.sum(probs, axis=-1, keepdims=True)
        out = product(probs.reshape(-1, v.shape[0]), v, 1, 0).reshape(q.shape) / total
        some = top > MASKED  # of queries that see nothing, zeros, here and in the gradients
        log_sums = jnp.where(some, top + jnp.log(total), 0)
        return None, (jnp.where(some, out, 0), log_sums[..., 0])

    seen = (jnp.repeat(a, kv_heads, axis=0) for a in (seen_from, seen_to))
    loop = (*(_split(a, kv_heads) for a in (q, k, v)), *seen)
    out, log_sums = lax.map(one, loop, batch_size=_together(q, kv_heads))
    return _join(out, kv_heads, q), log_sums


def _bwd(scoring: Scoring, reach: Reach, residuals: tuple[Array, ...], g_out: Array):
    return *over_rows(partial(gradients, scoring, reach))(*residuals, g_out), None


def gradients(
    scoring: Scoring, reach: Reach, q, k, v, seen_from, seen_to, out, log_sums, g_out
):  # fmt: skip
    """Gradients of q, k and v."""
    kv_heads = k.shape[2]

    def one(operands: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        q, k, v, log_sums, out, g_out, *seen = lax.optimization_barrier(operands)
        k, v = k[0], v[0]
        inner = jnp.sum(out * g_out, axis=-1)  # [G, T]
        dq, dk, dv = [], jnp.zeros_like(k.T), jnp.zeros_like(v.T)  # [H, T]: matmuls like it
        for start, end in _chunks(q.shape[1]):
            at = reach.keys(start, end, k.shape[0])
            chunk = partial(step, k[at], v[at], at.start)
            queries = (q, log_sums, inner, g_out, *(a[None] for a in seen))
            (dk_at, dv_at), dq_chunk = _over_queries(
                chunk, (dk[:, at], dv[:, at]), start, end, at.stop - at.start, *queries
            )
            dk, dv = dk.at[:, at].set(dk_at), dv.at[:, at].set(dv_at)
            dq.append(dq_chunk)
        return jnp.concatenate(dq, axis=1), dk.T[None], dv.T[None]

    def step(k: Array, v: Array, at: int, sums: Any, queries: Sequence[Array]):
        (dk, dv), (q, log_sums, inner, g_out, *seen) = sums, queries
        scaled, scores, slope = _scores(q, k, *seen, at, scoring)
        probs = jnp.exp(scores - log_sums[..., None]).reshape(scaled.shape[0], -1)
        g = g_out.reshape(scaled.shape)  # [G C, H]
        dv += product(g, probs, 0, 0)
        dscores = probs * (product(g, v, 1, 1) - inner.reshape(-1, 1))
        if slope is not None:
            dscores *= slope.reshape(dscores.shape)
        dk += product(scaled, dscores, 0, 0)
        dq = product(dscores, k, 1, 0) * scoring.scale
        return (dk, dv), dq.reshape(q.shape)

    seen = (jnp.repeat(a, kv_heads, axis=0) for a in (seen_from, seen_to))
    split = partial(_split, kv_heads=kv_heads)
    loop = (split(q), split(k), split(v), log_sums, split(out), split(g_out), *seen)
    dq, dk, dv = lax.map(one, loop, batch_size=_together(q, kv_heads))
    return tuple(_join(a, kv_heads, like) for a, like in ((dq, q), (dk, k), (dv, v)))


attention.defvjp(_fwd, _bwd)


def over_rows(rows_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`rows_fn` made such that a `vmap` around it takes the rows of all lanes at once: to the
    compiler they are one batch of the same loops and products. All arrays of `rows_fn` begin with
    rows that never see each other. It cannot be differentiated; it belongs inside rules that
    are."""
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
