"""Ring attention for intervals that look both ways, of rows that are cut over `context`.

    each device keeps its queries; keys and values come from the devices in reach, one by one:

    reach of one device     d1: kv 0, kv 1, kv 2
    reach of all            d1: kv 1, kv 2, kv 3, kv 0

Tokens stay in their order: both ways, every device has the same work. Chunks are computed whole,
as in `ring_attention`, whose softmax and gradients these are.
"""

from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from lmwright.core.compute import ATTENTION
from lmwright.core.param import Tree
from lmwright.core.sharding import by_shard
from lmwright.kernels import ring_attention
from lmwright.kernels.ring_attention import AXIS
from lmwright.nn.attention import MASKED, Scoring
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
        return ring_attention.rotated(self.ways, tree, by) if by else tree

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
    b, t, n, h = q.shape
    grouped = jnp.moveaxis(q.reshape(b, t, k.shape[2], -1, h), 1, 3)
    return jnp.moveaxis(_attend(ring, scoring, grouped, k, v, seen), 3, 1).reshape(b, t, n, h)


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
        return (
            ring.shifted(-1, kv),
            ring_attention.softmax_sums(scoring, queries, keys, sums),
        ), None

    zeros = jnp.zeros(q.shape, jnp.float32)
    none = (zeros, jnp.full(q.shape[:-1], MASKED, jnp.float32), zeros[..., 0])
    start = (ring.shifted(ring.first, (k, v)), none)
    (_, (out, top, total)), _ = lax.scan(body, start, jnp.arange(ring.count))
    out, log_sums = (out / total[..., None]).astype(q.dtype), top + jnp.log(total)
    out, log_sums = (checkpoint_name(a, ATTENTION) for a in (out, log_sums))
    return out, (q, k, v, seen, out, log_sums)


def _backward(ring: _Ring, scoring: Scoring, residuals: tuple, g: Array):
    q, k, v, seen, out, log_sums = residuals
    inner = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)
    queries, size = (q, g.astype(q.dtype), inner, log_sums, seen), k.shape[1]

    def body(carry, step: Array):
        kv, dq, dkv = carry
        keys = (*kv, ring.owner(step) * size)
        new_dq, *new = ring_attention.pair_gradients(scoring, queries, keys)
        dkv = jax.tree.map(jnp.add, dkv, tuple(new))
        return (ring.shifted(-1, kv), dq + new_dq, ring.shifted(-1, dkv)), None

    zeros = lambda a: jnp.zeros(a.shape, jnp.float32)  # noqa: E731
    start = (ring.shifted(ring.first, (k, v)), zeros(q), (zeros(k), zeros(v)))
    (_, dq, dkv), _ = lax.scan(body, start, jnp.arange(ring.count))
    dk, dv = ring.shifted((ring.count - ring.first) % ring.ways, dkv)  # home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
