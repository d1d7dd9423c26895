"""Attention with a window over rows that are cut over `context`: a device needs only the keys
and values of the stretch before its own tokens.

    row       |----- d0 -----|----- d1 -----|----- d2 -----|
    d1 gets            [stretch)                                  from d0, in one hop
    d1 sees            [stretch + its own    )

Tokens stay in their order, in which a window's work is as much on every device, so that neither
queries nor results travel; `ring_attention` moves both, and all keys. A stretch longer than a
device's part comes in several hops, all at once.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.compute import LANES
from lmwright.core.param import Tree
from lmwright.core.sharding import by_shard
from lmwright.kernels import online_softmax, ring_attention
from lmwright.kernels.online_softmax import (
    along,
    finished,
    grouped,
    named,
    sink_gradients,
    sinks_of,
    ungrouped,
    with_sinks,
)
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, causal

AXIS = ring_attention.AXIS


def is_near(window: int | None, seq_len: int) -> bool:
    """True if the stretches before all devices are less work than a balanced ring, which computes
    half of all scores."""
    return window is not None and window <= seq_len // 2


def stretch(window: int, seq_len: int, ways: int) -> int:
    """Number of tokens that a device gets, in whole lanes where its own are."""
    lanes = LANES if seq_len // ways % LANES == 0 else 1
    return min(-(-(window - 1) // lanes) * lanes, seq_len // ways * (ways - 1))


def causal_attention(
    near: Callable[..., Array], q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring,
    *sinks: Array,
) -> Array:  # fmt: skip
    """Causal attention, as `nn.attention.causal_attention`, inside a mesh whose `context` divides
    T; around a ring where the window is none or wide. `near` has the signature of `attend`."""
    seq_len = q.shape[1]
    if not is_near(scoring.window, seq_len):
        return ring_attention.causal_attention(q, k, v, segment_ids, scoring, *sinks)
    ways = jax.sharding.get_abstract_mesh().shape[AXIS]
    size = stretch(scoring.window, seq_len, ways)
    local = partial(_local, partial(near, scoring=scoring), ways, size)
    return by_shard(local, *["heads"] * len(sinks))(q, k, v, segment_ids, *sinks)


def _local(
    near: Callable[..., Array], ways: int, size: int, q: Array, k: Array, v: Array, ids: Array,
    *sinks: Array,
) -> Array:  # fmt: skip
    """One device's part: q [B, t, N, H]; k, v [B, t, K, H]; ids [B, t] with t = T / ways; sinks
    [N]."""
    near = partial(near, sinks=sinks[0]) if sinks else near
    if not size:
        return near(q, k, v, ids)
    k, v = (jnp.concatenate([_before(ways, size, a), a], axis=1) for a in (k, v))
    before = _before(ways, size, ids + 1) - 1  # -1, which no query has, where no device sends
    return near(q, k, v, jnp.concatenate([before, ids], axis=1))


def _before(ways: int, size: int, a: Array) -> Array:
    """The `size` tokens of [B, T, ...] before those of a device; zeros before the first."""
    mine, pieces = a.shape[1], []
    for hop in range(-(-size // mine), 0, -1):
        sent = a[:, mine - min(mine, size - (hop - 1) * mine) :]
        pieces.append(lax.ppermute(sent, AXIS, [(i, i + hop) for i in range(ways - hop)]))
    return jnp.concatenate(pieces, axis=1)


def attend(
    q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring, sinks: Array | None = None
) -> Array:
    """Causal attention with a window for the last t of s + t tokens: q [B, t, N, H]; k, v [B, s +
    t, K, H], ids [B, s + t]; sinks [N]. Scores of few queries exist at once."""
    seen = jax.tree.map(lambda a: a[:, -q.shape[1] :], causal(segment_ids, scoring.window))
    sink = sinks_of(k, sinks)
    return ungrouped(_pieces(scoring, grouped(q, k.shape[2]), k, v, seen, sink))


class _Pieces(NamedTuple):
    """Pieces of `queries` queries, each with the `keys` keys that end at the same token."""

    queries: int
    keys: int
    starts: Array

    @classmethod
    def of(cls, seen: Interval, k: Array) -> Self:
        t = seen.start.shape[1]
        size = next(c for c in range(min(online_softmax.QUERIES, t), 0, -1) if t % c == 0)
        return cls(size, size + k.shape[1] - t, size * jnp.arange(t // size))

    def of_queries(self, start: Array, tree: Tree, axis: int = 3) -> Tree:
        cut = lambda a: lax.dynamic_slice_in_dim(a, start, self.queries, axis)  # noqa: E731
        return jax.tree.map(cut, tree)

    def of_keys(self, start: Array, *arrays: Array) -> list[Array]:
        return [lax.dynamic_slice_in_dim(a, start, self.keys, 1) for a in arrays]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pieces(
    scoring: Scoring, q: Array, k: Array, v: Array, seen: Interval, sinks: Array | None
) -> Array:
    """Attention of q [B, K, G, t, H] to k, v [B, s + t, K, H], with sinks [K, G, 1] if there are
    any; the result has the shape of q."""
    return _forward(scoring, q, k, v, seen, sinks)[0]


def _forward(scoring: Scoring, q: Array, k: Array, v: Array, seen: Interval, sinks: Array | None):
    pieces = _Pieces.of(seen, k)

    def piece(start: Array) -> tuple[Array, Array]:
        some_q = pieces.of_queries(start, q * scoring.scale)
        some_k, some_v = pieces.of_keys(start, k, v)
        here = pieces.of_queries(start, seen, axis=1)
        scores, _ = online_softmax.scores_of(scoring, some_q, some_k, here, start)
        top = jnp.max(scores, axis=-1)
        probs = jnp.exp(scores - top[..., None])
        total = jnp.sum(probs, axis=-1)
        out = jnp.einsum(
            "bkgts,bskh->bkgth", probs.astype(v.dtype), some_v, preferred_element_type=jnp.float32
        )
        return finished((out, top, total), q.dtype)

    out, log_sums = (online_softmax.joined(a) for a in lax.map(piece, pieces.starts))
    if sinks is not None:
        out, log_sums = with_sinks(out, log_sums, sinks[None])
    out, log_sums = named(out, log_sums)
    return out, (q, k, v, seen, sinks, out, log_sums)


def _backward(scoring: Scoring, residuals: tuple, g: Array):
    q, k, v, seen, sinks, out, log_sums = residuals
    inner = along(out, g)
    pieces = _Pieces.of(seen, k)

    def piece(sums: tuple[Array, ...], start: Array) -> tuple[tuple[Array, ...], Array]:
        arrays = pieces.of_queries(start, (q, g.astype(q.dtype), inner, log_sums))
        here = pieces.of_queries(start, seen, axis=1)
        keys = (*pieces.of_keys(start, k, v), start)
        dq, *new = online_softmax.gradients_of(scoring, arrays, here, keys)
        added = map(jnp.add, pieces.of_keys(start, *sums), new)
        put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        return tuple(put(a, b) for a, b in zip(sums, added, strict=True)), dq

    zeros = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = lax.scan(piece, (zeros, zeros), pieces.starts)
    dq = online_softmax.joined(dq).astype(q.dtype)
    dsinks = None if sinks is None else sink_gradients(sinks[None], log_sums, inner)[0]
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, dsinks


_pieces.defvjp(_forward, _backward)
