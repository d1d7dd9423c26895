"""Ring attention for intervals that look both ways, of rows that are cut over `context`.

    each device keeps its queries; keys and values come from the devices in reach, one by one:

    reach of one device     d1: kv 0, kv 1, kv 2
    reach of all            d1: kv 1, kv 2, kv 3, kv 0

Tokens stay in their order: both ways, every device has the same work. Chunks are computed whole,
as in `ring_attention`.
"""

from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.param import Tree
from lmwright.core.sharding import by_shard
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
from lmwright.kernels.ring_attention import AXIS, rotated
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach, zero_unseen


class _Ring(NamedTuple):
    """The devices whose keys a device sees, in the order of the row: the first is upstream of
    itself. At the ends of the row it wraps around, and those keys are masked."""

    ways: int
    first: int
    count: int

    @classmethod
    def of(cls, reach: Reach, ways: int, tokens: int) -> Self:
        """The ring for rows cut into `ways` stretches of `tokens`."""
        if reach.before is None or reach.after is None:
            return cls(ways, 0, ways)
        before, after = (-(-side // tokens) for side in (reach.before, reach.after))
        return (
            cls(ways, before, before + 1 + after) if before + after < ways else cls(ways, 0, ways)
        )

    def shifted(self, by: int, tree: Tree) -> Tree:
        """Arrays of the device that is `by` before this one."""
        return rotated(self.ways, tree, by) if by else tree

    def owner(self, step: Array) -> Array:
        """The device whose keys this one holds in a step."""
        return (lax.axis_index(AXIS) - self.first + step) % self.ways


def attention(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach
) -> Array:
    """Attention over intervals within `reach`, as `nn.intervals.attention`, inside a mesh whose
    `context` divides T."""
    ways = jax.sharding.get_abstract_mesh().shape[AXIS]
    ring = _Ring.of(reach, ways, q.shape[1] // ways)
    out = by_shard(partial(_local, ring, scoring))(q, k, v, seen)
    return out if reach.exact else zero_unseen(out, seen)


def _local(ring: _Ring, scoring: Scoring, q: Array, k: Array, v: Array, seen: Interval) -> Array:
    """One device's part: q [B, t, N, H]; k, v [B, t, K, H]; seen [B, t] with t = T / ways."""
    return ungrouped(_attend(ring, scoring, grouped(q, k.shape[2]), k, v, seen))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(ring: _Ring, scoring: Scoring, q: Array, k: Array, v: Array, seen: Interval) -> Array:
    """Attention of q [B, K, G, t, H] to k, v [B, t, K, H] within seen [B, t]; the result has the
    shape of q."""
    return _forward(ring, scoring, q, k, v, seen)[0]


def _forward(ring: _Ring, scoring: Scoring, q: Array, k: Array, v: Array, seen: Interval):
    queries, size = (q * scoring.scale, seen), k.shape[1]

    def body(carry, step: Array):
        kv, sums = carry
        keys = (*kv, ring.owner(step) * size)
        return (ring.shifted(-1, kv), softmax_sums(scoring, queries, keys, sums)), None

    start = (ring.shifted(ring.first, (k, v)), no_sums(q.shape))
    (_, sums), _ = lax.scan(body, start, jnp.arange(ring.count))
    out, log_sums = named(*finished(sums, q.dtype))
    return out, (q, k, v, seen, out, log_sums)


def _backward(ring: _Ring, scoring: Scoring, residuals: tuple, g: Array):
    q, k, v, seen, out, log_sums = residuals
    queries, size = (q, g.astype(q.dtype), along(out, g), log_sums, seen), k.shape[1]

    def body(carry, step: Array):
        kv, dq, dkv = carry
        keys = (*kv, ring.owner(step) * size)
        new_dq, *new = pair_gradients(scoring, queries, keys)
        dkv = jax.tree.map(jnp.add, dkv, tuple(new))
        return (ring.shifted(-1, kv), dq + new_dq, ring.shifted(-1, dkv)), None

    zeros = lambda a: jnp.zeros(a.shape, jnp.float32)  # noqa: E731
    start = (ring.shifted(ring.first, (k, v)), zeros(q), (zeros(k), zeros(v)))
    (_, dq, dkv), _ = lax.scan(body, start, jnp.arange(ring.count))
    dk, dv = ring.shifted((ring.count - ring.first) % ring.ways, dkv)  # home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
