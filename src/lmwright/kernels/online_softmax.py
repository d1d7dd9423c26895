"""Online softmax of attention in plain XLA: chunk after chunk of keys, a few queries at a time
(https://arxiv.org/abs/2112.05682). Rings, windows, chunks on GPUs and blocks are made of it.

    sums (out, top, total) of queries --one more chunk of keys--> sums --finished--> out, log sums
    (q, g, inner, log sums) of queries, one chunk of keys        --> float32 dq, dk, dv

Queries are [B, K, G, t, H], keys and values [B, s, K, H]; which keys a query sees is an interval of
places in the row (`nn.intervals`). The backward pass computes scores again from the log of the
softmax sum, as in FlashAttention (https://arxiv.org/abs/2205.14135).
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from lmwright.core.compute import ATTENTION
from lmwright.nn.attention import MASKED, Scoring
from lmwright.nn.intervals import Interval

QUERIES = 512  # of a chunk whose scores exist at once

Sums = tuple[Array, Array, Array]
"""float32 out [B, K, G, t, H], the largest score and the total [B, K, G, t] of queries so far."""


def grouped(a: Array, kv_heads: int) -> Array:
    """[B, t, K G, ...] to [B, K, G, t, ...]."""
    b, t, n, *rest = a.shape
    return jnp.moveaxis(a.reshape(b, t, kv_heads, n // kv_heads, *rest), 1, 3)


def ungrouped(a: Array) -> Array:
    """The inverse of `grouped`."""
    b, kv_heads, g, t, *rest = a.shape
    return jnp.moveaxis(a, 3, 1).reshape(b, t, kv_heads * g, *rest)


def no_sums(shape: tuple[int, ...]) -> Sums:
    """The sums of queries of a shape that have seen no key."""
    zeros = jnp.zeros(shape, jnp.float32)
    return zeros, jnp.full(shape[:-1], MASKED, jnp.float32), zeros[..., 0]


def finished(sums: Sums, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The result of attention in `dtype`, and the logs of the softmax sums."""
    out, top, total = sums
    return (out / total[..., None]).astype(dtype), top + jnp.log(total)


def sinks_of(k: Array, sinks: Array | None = None) -> Array | None:
    """float32 [K, G, 1] of sinks [K G], for keys [B, s, K, H]; None where there are none."""
    return None if sinks is None else sinks.astype(jnp.float32).reshape(k.shape[-2], -1, 1)


def with_sinks(out: Array, log_sums: Array, sinks: Array) -> tuple[Array, Array]:
    """The result in its dtype, and the logs of the softmax sums, with one more score under each
    softmax whose key has no value; `sinks` float32 of a shape that goes with the sums'."""
    total = jnp.logaddexp(log_sums, sinks)
    return (out * jnp.exp(log_sums - total)[..., None]).astype(out.dtype), total


def sink_gradients(sinks: Array, log_sums: Array, inner: Array) -> Array:
    """The gradient of `sinks`, summed over all axes along which they are the same; `inner` are the
    products of result and gradient, of the shape of `log_sums`."""
    each = -jnp.exp(sinks - log_sums) * inner
    same = [a for a in range(each.ndim) if sinks.shape[a] == 1]
    return jnp.sum(each, axis=same, keepdims=True)


def named(*arrays: Array) -> tuple[Array, ...]:
    """Results of attention, named for rematerialization policies."""
    return tuple(checkpoint_name(a, ATTENTION) for a in arrays)


def along(out: Array, g: Array) -> Array:
    """float32 products of a result and its gradient, summed along the last axis."""
    return jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)


def scores_of(
    scoring: Scoring, q: Array, k: Array, seen: Interval, k_start: Array | int
) -> tuple[Array, Array | None]:
    """Masked float32 scores [B, K, G, t, s] of scaled queries [B, K, G, t, H], which see the places
    `seen` [B, t], for keys that begin at `k_start`; and the derivative of the soft cap (None
    without one)."""
    scores = jnp.einsum("bkgth,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores, slope = scoring.capped_with_slope(scores)
    here = jax.tree.map(lambda a: a - k_start, seen)
    return jnp.where(here.mask(k.shape[1])[:, None, None], scores, MASKED), slope


def _in_pieces(fn, queries: tuple[Array, ...], seen: Interval):
    """`fn(queries, seen)` on a few queries at a time. Arrays of `queries` and the first
    result have them on axis 3; other results are summed."""
    t = seen.start.shape[1]
    size = next(c for c in range(min(QUERIES, t), 0, -1) if t % c == 0)
    if size == t:
        return fn(queries, seen)

    def cut(axis: int, a: Array) -> Array:
        shape = (*a.shape[:axis], t // size, size, *a.shape[axis + 1 :])
        return jnp.moveaxis(a.reshape(shape), axis, 0)

    def body(sums, piece):
        parts, *new = fn(*piece)
        return jax.tree.map(jnp.add, sums, tuple(new)), parts

    pieces = (jax.tree.map(partial(cut, 3), queries), jax.tree.map(partial(cut, 1), seen))
    shapes = jax.eval_shape(fn, *jax.tree.map(lambda a: a[0], pieces))[1:]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums, parts = lax.scan(body, zeros, pieces)
    return jax.tree.map(joined, parts), *sums


def joined(a: Array) -> Array:
    """Pieces of queries [C, B, K, G, t, ...], one after the other, joined to [B, K, G, C t,
    ...]."""
    return jnp.moveaxis(a, 0, 3).reshape(*a.shape[1:4], -1, *a.shape[5:])


def softmax_sums(scoring: Scoring, queries: tuple, keys: tuple, sums: Sums) -> Sums:
    """The sums of `queries` (q scaled, the places `seen`) after one more chunk (k, v, start) of
    `keys`."""
    q, seen = queries
    k, v, k_start = keys

    def some(queries, seen):
        q, out, top, total = queries
        scores, _ = scores_of(scoring, q, k, seen, k_start)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        probs = jnp.exp(scores - new_top[..., None])
        keep = jnp.exp(top - new_top)
        new = jnp.einsum("bkgts,bskh->bkgth", probs.astype(v.dtype), v,
                         preferred_element_type=jnp.float32)  # fmt: skip
        total = total * keep + jnp.sum(probs, axis=-1)
        return ((out * keep[..., None] + new, new_top, total),)

    return _in_pieces(some, (q, *sums), seen)[0]


def pair_gradients(scoring: Scoring, queries: tuple, keys: tuple) -> tuple[Array, Array, Array]:
    """Float32 (dq, dk, dv) of one chunk of `queries`, the arrays of `gradients_of` and then the
    places `seen`, and one chunk (k, v, start) of `keys`."""
    *arrays, seen = queries

    def some(arrays, seen):
        dq, dk, dv = gradients_of(scoring, arrays, seen, keys)
        return (dq,), dk, dv

    (dq,), dk, dv = _in_pieces(some, tuple(arrays), seen)
    return dq, dk, dv


def gradients_of(
    scoring: Scoring, arrays: Sequence[Array], seen: Interval, keys: tuple
) -> tuple[Array, Array, Array]:
    """Float32 (dq, dk, dv) of `arrays`: q and the result's gradient [B, K, G, t, H], the products
    of result and gradient and the logs of the softmax sums [B, K, G, t]; `keys` are (k, v,
    start)."""
    q, g, inner, log_sums = arrays
    k, v, k_start = keys
    scores, slope = scores_of(scoring, q * scoring.scale, k, seen, k_start)
    probs = jnp.exp(scores - log_sums[..., None])
    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
    dv = wide("bkgts,bkgth->bskh", probs.astype(g.dtype), g)
    dprobs = wide("bkgth,bskh->bkgts", g, v)
    dscores = probs * (dprobs - inner[..., None]) * scoring.scale
    dscores = (dscores if slope is None else dscores * slope).astype(q.dtype)
    dq = wide("bkgts,bskh->bkgth", dscores, k)
    return dq, wide("bkgts,bkgth->bskh", dscores, q), dv
