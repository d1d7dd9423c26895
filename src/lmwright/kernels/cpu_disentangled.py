"""Disentangled attention for CPUs: a few heads of a row at a time, so that scores stay in cache.

    for some heads: for each row:  q k v [T, H], rows of all distances [2 T - 1, H]
        two products with the distances, moved into place, and that of q and k --> softmax --> out

The backward pass computes scores again. Arithmetic is float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from lmwright.core.compute import ATTENTION
from lmwright.core.cpu import product
from lmwright.nn.attention import MASKED
from lmwright.nn.disentangled import Disentangled, rows_in_order, shifted

CACHE_BYTES = 2 << 20  # scores with distances that exist at once, of one term


def attention(
    q: Array, k: Array, v: Array, position_keys: Array, position_queries: Array,
    segment_ids: Array, scoring: Disentangled,
) -> Array:  # fmt: skip
    """Disentangled attention, as `nn.disentangled.attention`."""
    _, t, n, _ = q.shape
    rows = rows_in_order(t, position_keys.shape[0], scoring.max_distance)
    fits = [m for m in range(1, n + 1) if n % m == 0 and 4 * m * t * (2 * t - 1) <= CACHE_BYTES]
    split = partial(_by_heads, together=max(fits, default=1))
    heads = jax.checkpoint(jax.vmap(partial(_one_head, scoring.scale), (0, 0, 0, 0, 0, None)))

    def some_heads(operands: tuple[Array, ...]) -> Array:
        q, k, v, keys, queries = operands
        one_row = lambda row: heads(*row[:3], keys[0], queries[0], row[3])  # noqa: E731
        return lax.map(one_row, (q, k, v, segment_ids))

    positions = (position_keys[rows], position_queries[rows[::-1]])
    inputs = (*(split(a) for a in (q, k, v)), *(split(a[None]) for a in positions))
    out = lax.map(some_heads, inputs)  # [N / M, B, M, T, H]
    out = jnp.transpose(out, (1, 3, 0, 2, 4)).reshape(q.shape)
    return checkpoint_name(out.astype(q.dtype), ATTENTION)


def _by_heads(a: Array, together: int) -> Array:
    """float32 [N / M, B, M, T, H] of [B, T, N, H], for M heads `together`."""
    b, t, n, h = a.shape
    parts = a.astype(jnp.float32).reshape(b, t, n // together, together, h)
    return jnp.transpose(parts, (2, 0, 3, 1, 4))


def _one_head(
    scale: float, q: Array, k: Array, v: Array, keys: Array, queries: Array, ids: Array
) -> Array:
    """The attention of one head: [T, H] of q, k, v [T, H]; keys and queries [2 T - 1, H] of
    distances in order; ids [T]."""
    content, position = shifted(product(q, keys, 1, 1)), shifted(product(k, queries, 1, 1))
    scores = (product(q, k, 1, 1) + content + position.T) * scale
    seen = (ids[:, None] == ids) & (ids > 0)
    probs = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
    return jnp.where((ids > 0)[:, None], product(probs, v, 1, 0), 0)
