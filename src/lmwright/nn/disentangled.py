"""Disentangled attention (https://arxiv.org/abs/2006.03654): scores of content and of relative
position.

    score[t, s] = scale (Q_t . K_s  +  Q_t . PK[row(t - s)]  +  PQ[row(t - s)] . K_s)
                         content        content to position      position to content

PK and PQ [2k, N, H] are keys and queries of 2k distances. Near distances have a row of their own;
the farther away, the more distances share a row (`rows_of`). Tokens of a segment
stand together, so the distance in the segment is that in the row.

A product with the rows of all distances -(T - 1) ... T - 1 in order has every score that is asked
for, each row one place further to the left than the one above: `shifted` moves them by a change
of shape, without a gather over [T, T].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.nn.attention import MASKED


class Disentangled(NamedTuple):
    """Scale and distances with which products become scores; hashable."""

    scale: float
    """Factor on the sum of the three products: (3 H) ** -0.5."""
    max_distance: int
    """The distance from which all share the last row."""


def rows_of(distance: np.ndarray, num_rows: int, max_distance: int) -> np.ndarray:
    """int32, the rows of PK and PQ for distances d = t - s of a query t and a key s: k + d for |d|
    up to k / 2, on a logarithmic scale from there to `max_distance`; k is half of `num_rows`."""
    half, middle = num_rows // 2, num_rows // 4
    far = np.maximum(np.abs(distance), middle).astype(np.float32) / np.float32(middle)
    widest = np.log(np.float32((max_distance - 1) / middle))
    steps = np.ceil(np.log(far) / widest * np.float32(middle - 1)) + middle
    bucket = np.where(np.abs(distance) <= middle, distance, np.sign(distance) * steps)
    return np.clip(bucket + half, 0, num_rows - 1).astype(np.int32)


def rows_in_order(length: int, num_rows: int, max_distance: int) -> np.ndarray:
    """int32 [2 T - 1], the rows of the distances T - 1, T - 2 ... -(T - 1) in rows of `length` T:
    those of query t begin with its key 0 at place T - 1 - t."""
    return rows_of(np.arange(length - 1, -length, -1), num_rows, max_distance)


def attention(
    q: Array, k: Array, v: Array, position_keys: Array, position_queries: Array,
    segment_ids: Array, scoring: Disentangled,
) -> Array:  # fmt: skip
    """Attention on both sides inside segments, [B, T, N, H], softmax in float32: the reference of
    every kernel. Padding, which has segment 0, gives zeros.

    q, k, v [B, T, N, H]; position_keys and position_queries [2k, N, H] as they are projected, with
    biases; segment_ids [B, T].
    """
    ids = segment_ids
    seen = (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, :, None]  # [B, T, S]
    scores = _product("btnh,bsnh->bnts", q, k) + distance_scores(
        q, k, position_keys, position_queries, scoring.max_distance
    )
    scores = jnp.where(seen[:, None], scores * scoring.scale, MASKED)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = _product("bnts,bsnh->btnh", probs, v)
    return jnp.where((ids > 0)[..., None, None], out, 0).astype(q.dtype)


def distance_scores(
    q: Array, k: Array, position_keys: Array, position_queries: Array, max_distance: int
) -> Array:
    """float32 [B, N, T, T], the sum of the two products with positions, without the scale."""
    rows = rows_in_order(q.shape[1], position_keys.shape[0], max_distance)
    content = _product("btnh,rnh->bntr", q, position_keys[rows])
    # the distance t - s grows with the query, so rows of a key are those in the other order
    position = _product("bsnh,rnh->bnsr", k, position_queries[rows[::-1]])
    return shifted(content) + shifted(position).swapaxes(2, 3)


def shifted(scores: Array) -> Array:
    """[..., T, T] of scores [..., T, 2 T - 1]: row t from its place T - 1 - t on."""
    *batch, t, width = scores.shape
    flat = jnp.pad(scores, (*((0, 0),) * (len(batch) + 1), (0, 1))).reshape(*batch, t * (width + 1))
    return flat[..., t - 1 : t - 1 + t * width].reshape(*batch, t, width)[..., :t]


def _product(eqn: str, a: Array, b: Array) -> Array:
    return jnp.einsum(eqn, a, b, preferred_element_type=jnp.float32)
