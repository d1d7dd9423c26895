"""Ring attention (https://arxiv.org/abs/2310.01889) for rows that are cut over `context`.

    each device keeps its queries; keys and values go around the ring:

    step 0   d0: kv 0   d1: kv 1   d2: kv 2      own keys
    step 1   d0: kv 2   d1: kv 0   d2: kv 1      the neighbor's, and so on

Under a causal mask the first tokens see little and the last see all, so a row is cut into
twice as many chunks as devices, and device d works on the d-th from either end, `low` and
`high` (striped as in https://arxiv.org/abs/2311.09431). Every later step is then two full
pairs of chunks on every device, and nothing above the diagonal is computed:

    high queries x low keys, and    low x low where the keys' owner comes before
                                    high x high where it comes after

The softmax is taken online in float32; the backward pass goes around once more with the
gradients of keys and values, so memory is linear in the tokens. Which keys a query sees is an
interval of places in the row (`nn.intervals`), found from the segment ids of all devices.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.param import Tree
from lmwright.core.sharding import by_shard
from lmwright.kernels.online_softmax import (
    along,
    named,
    no_sums,
    pair_gradients,
    sink_gradients,
    sinks_of,
    softmax_sums,
    with_sinks,
)
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, causal

AXIS = "context"


def causal_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring, *sinks: Array
) -> Array:
    """Causal attention, as `nn.attention.causal_attention`, inside a mesh whose `context` divides
    T. Chunks that lie wholly before a window are still computed (`window_attention` has none)."""
    ways = jax.sharding.get_abstract_mesh().shape[AXIS]
    local = partial(_local, ways, scoring)
    return by_shard(local, *["heads"] * len(sinks))(q, k, v, segment_ids, *sinks)


def _local(
    ways: int, scoring: Scoring, q: Array, k: Array, v: Array, ids: Array, *sinks: Array
) -> Array:
    """One device's part: q [B, t, N, H]; k, v [B, t, K, H]; ids [B, t] with t = T / ways; sinks
    [N]."""
    b, t, n, h = q.shape
    q = q.reshape(b, t, k.shape[2], -1, h)
    row = causal(lax.all_gather(ids, AXIS, axis=1, tiled=True), scoring.window)
    starts = _starts(ways, lax.axis_index(AXIS), t // 2)
    cut = lambda a: [lax.dynamic_slice_in_dim(a, start, t // 2, 1) for start in starts]  # noqa: E731
    seen = jax.tree.map(lambda a: jnp.stack(cut(a)), row)  # [2, B, t / 2]
    q, k, v = (_striped(ways, a) for a in (q, k, v))
    sink = sinks_of(k, *sinks)
    out = _ring(ways, scoring, jnp.moveaxis(q, 2, 4), k, v, seen, sink)
    return _unstriped(ways, jnp.moveaxis(out, 4, 2)).reshape(b, t, n, h)


def _moves(ways: int, half: int) -> list[tuple[int, int]]:
    """(from, to) of the chunks 2 i + half, which device i holds in order."""
    chunks = [2 * i + half for i in range(ways)]
    return [(i, min(c, 2 * ways - 1 - c)) for i, c in enumerate(chunks)]


def _low_first(a: Array) -> Array:
    """Even chunks come with one exchange and odd ones with the other: on odd devices the
    odd chunk is the low one. Its own inverse."""
    return jnp.where(lax.axis_index(AXIS) % 2 == 0, a, a[::-1])


def _striped(ways: int, a: Array) -> Array:
    """[B, t, ...] in order to (low, high), [2, B, t / 2, ...]."""
    halves = jnp.split(a, 2, axis=1)
    moved = [lax.ppermute(x, AXIS, _moves(ways, i)) for i, x in enumerate(halves)]
    return _low_first(jnp.stack(moved))


def _unstriped(ways: int, a: Array) -> Array:
    """The inverse of `_striped`."""
    back = [[(to, here) for here, to in _moves(ways, i)] for i in range(2)]
    halves = zip(_low_first(a), back, strict=True)
    return jnp.concatenate([lax.ppermute(x, AXIS, moves) for x, moves in halves], axis=1)


def _starts(ways: int, rank: Array, size: int) -> Array:
    """Places in the row of a device's low and high chunk, int [2]."""
    return jnp.stack([rank, 2 * ways - 1 - rank]) * size


def rotated(ways: int, tree: Tree, by: int = 1) -> Tree:
    """Arrays of the device that is `by` places upstream in the ring."""
    around = [(i, (i + by) % ways) for i in range(ways)]
    return jax.tree.map(lambda a: lax.ppermute(a, AXIS, around), tree)


def _at(i: int, tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[i], tree)


def _pick(low: Array, tree: Tree) -> Tree:
    """The low chunks of (low, high) arrays where `low` is True, else the high ones."""
    return jax.tree.map(lambda a: jnp.where(low, a[0], a[1]), tree)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    ways: int, scoring: Scoring, q: Array, k: Array, v: Array, seen: Interval, sinks: Array | None
) -> Array:
    """Attention of q [2, B, K, G, t, H] to k, v [2, B, t, K, H] within seen [2, B, t]: low and high
    chunk; with sinks [K, G, 1] if there are any."""
    return _forward(ways, scoring, q, k, v, seen, sinks)[0]


def _forward(
    ways: int, scoring: Scoring, q: Array, k: Array, v: Array, seen: Interval, sinks: Array | None
):
    rank, size = lax.axis_index(AXIS), k.shape[2]
    queries = (q * scoring.scale, seen)
    mine = (k, v, _starts(ways, rank, size))

    none = no_sums(q.shape[1:])
    low = softmax_sums(scoring, _at(0, queries), _at(0, mine), none)
    high = softmax_sums(scoring, _at(1, queries), _at(0, mine), none)
    high = softmax_sums(scoring, _at(1, queries), _at(1, mine), high)

    def body(carry, step: Array):
        kv, low, high = carry
        owner = (rank - step) % ways
        keys, before = (*kv, _starts(ways, owner, size)), owner < rank
        high = softmax_sums(scoring, _at(1, queries), _at(0, keys), high)
        sums = jax.tree.map(partial(jnp.where, before), low, high)
        new = softmax_sums(scoring, _pick(before, queries), _pick(before, keys), sums)
        low = jax.tree.map(partial(jnp.where, before), new, low)
        high = jax.tree.map(partial(jnp.where, before), high, new)
        return (rotated(ways, kv), low, high), None

    start = (rotated(ways, (k, v)), low, high)
    (_, *sums), _ = lax.scan(body, start, jnp.arange(1, ways))
    out = jnp.stack([out / total[..., None] for out, _, total in sums]).astype(q.dtype)
    log_sums = jnp.stack([top + jnp.log(total) for _, top, total in sums])
    if sinks is not None:
        out, log_sums = with_sinks(out, log_sums, sinks[None, None])
    out, log_sums = named(out, log_sums)
    return out, (q, k, v, seen, sinks, out, log_sums)


def _backward(ways: int, scoring: Scoring, residuals: tuple, g: Array):
    q, k, v, seen, sinks, out, log_sums = residuals
    rank, size = lax.axis_index(AXIS), k.shape[2]
    inner = along(out, g)
    queries = (q, g.astype(q.dtype), inner, log_sums, seen)
    mine = (k, v, _starts(ways, rank, size))

    pair = lambda i, j: pair_gradients(scoring, _at(i, queries), _at(j, mine))  # noqa: E731
    (dq_low, *dkv_low), (dq_high, *dkv_both), (dq_last, *dkv_high) = (
        pair(0, 0),
        pair(1, 0),
        pair(1, 1),
    )
    dq = jnp.stack([dq_low, dq_high + dq_last])
    dkv = [jnp.stack([a + b, c]) for a, b, c in zip(dkv_low, dkv_both, dkv_high, strict=True)]

    def body(carry, step: Array):
        kv, dq, dkv = carry
        owner = (rank - step) % ways
        keys, before = (*kv, _starts(ways, owner, size)), owner < rank
        dq_high, *dkv_low = pair_gradients(scoring, _at(1, queries), _at(0, keys))
        new_dq, *new_dkv = pair_gradients(scoring, _pick(before, queries), _pick(before, keys))
        chunk = jnp.where(before, 0, 1)
        dq = dq.at[1].add(dq_high).at[chunk].add(new_dq)
        dkv = [
            d.at[0].add(a).at[chunk].add(b) for d, a, b in zip(dkv, dkv_low, new_dkv, strict=True)
        ]
        return (rotated(ways, kv), dq, rotated(ways, dkv)), None

    start = (rotated(ways, (k, v)), dq, rotated(ways, dkv))
    (_, dq, dkv), _ = lax.scan(body, start, jnp.arange(1, ways))
    return (
        dq.astype(q.dtype),
        *(d.astype(like.dtype) for d, like in zip(dkv, (k, v), strict=True)),
        None,
        None if sinks is None else sink_gradients(sinks[None, None], log_sums, inner)[0, 0],
    )


_ring.defvjp(_forward, _backward)
