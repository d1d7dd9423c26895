"""Ring attention (https://arxiv.org/abs/2310.01889) for rows that are cut over `context`.

    each device keeps its queries; keys, values and segment ids go around the ring:

    step 0   d0: kv 0   d1: kv 1   d2: kv 2      own keys
    step 1   d0: kv 2   d1: kv 0   d2: kv 1      the neighbor's, and so on

Under a causal mask the first tokens see little and the last see all, so rows are cut into
twice as many chunks as devices and device d works on the d-th from either end (striped as
in https://arxiv.org/abs/2311.09431): every step is the same work everywhere. Pairs of chunks
above the diagonal are skipped. The softmax is taken online in float32; the backward pass goes
around once more with the gradients of keys and values, so memory is linear in the tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from podsmith.core.sharding import ACTIVATIONS, partition
from podsmith.core.stack import ATTENTION
from podsmith.nn.attention import MASKED

AXIS = "context"
QUERIES = 512  # of a chunk whose scores exist at once


def causal_attention(q: Array, k: Array, v: Array, segment_ids: Array, scale: float) -> Array:
    """As `nn.attention.causal_attention`, inside a mesh whose `context` divides T."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = lambda axes: partition(tuple(axes.split()), ACTIVATIONS)  # noqa: E731
    heads, kv_heads = spec("batch seq heads head_dim"), spec("batch seq kv_heads head_dim")
    return jax.shard_map(
        partial(_local, mesh.shape[AXIS], scale),
        mesh=mesh,
        in_specs=(heads, kv_heads, kv_heads, spec("batch seq")),
        out_specs=heads,
        check_vma=False,
    )(q, k, v, segment_ids)


def _local(ways: int, scale: float, q: Array, k: Array, v: Array, ids: Array) -> Array:
    """One device's part: q [B, t, N, H]; k, v [B, t, K, H]; ids [B, t] with t = T / ways."""
    b, t, n, h = q.shape
    q = q.reshape(b, t, k.shape[2], -1, h)
    q, k, v, ids = (_striped(ways, a) for a in (q, k, v, ids))
    out = _ring(ways, scale, jnp.moveaxis(q, 2, 4), k, v, ids)
    return _unstriped(ways, jnp.moveaxis(out, 4, 2), t).reshape(b, t, n, h)


def _moves(ways: int, half: int) -> list[tuple[int, int]]:
    """(from, to) of the chunks 2 i + half, which device i holds in order."""
    chunks = [2 * i + half for i in range(ways)]
    return [(i, min(c, 2 * ways - 1 - c)) for i, c in enumerate(chunks)]


def _striped(ways: int, a: Array) -> Array:
    """[B, t, ...] in order to [2, B, t / 2, ...]: chunk `_chunks(...)` of the row each.
    An odd t stays one chunk, [1, B, t, ...]."""
    if a.shape[1] % 2:
        return a[None]
    halves = jnp.split(a, 2, axis=1)
    return jnp.stack([lax.ppermute(x, AXIS, _moves(ways, i)) for i, x in enumerate(halves)])


def _unstriped(ways: int, a: Array, t: int) -> Array:
    """The inverse of `_striped`."""
    if t % 2:
        return a[0]
    back = [[(to, here) for here, to in _moves(ways, i)] for i in range(2)]
    return jnp.concatenate([lax.ppermute(a[i], AXIS, back[i]) for i in range(2)], axis=1)


def _chunks(ways: int, rank: Array, count: int) -> list[Array]:
    """Which chunks of the row a device works on; the even one comes first."""
    if count == 1:
        return [rank]
    other = 2 * ways - 1 - rank
    even = rank % 2 == 0
    return [jnp.where(even, rank, other), jnp.where(even, other, rank)]


def _rotated(ways: int, tree):
    around = [(i, (i + 1) % ways) for i in range(ways)]
    return jax.tree.map(lambda a: lax.ppermute(a, AXIS, around), tree)


def _scores(q: Array, k: Array, q_ids: Array, k_ids: Array, q_start: Array, k_start: Array):
    """Masked float32 scores [B, K, G, t, s] of scaled queries [B, K, G, t, H]."""
    scores = jnp.einsum("bkgth,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    query = q_start + jnp.arange(q.shape[3])[:, None]
    key = k_start + jnp.arange(k.shape[1])[None]
    seen = (query >= key) & (q_ids[:, :, None] == k_ids[:, None, :])
    return jnp.where(seen[:, None, None], scores, MASKED)


def _in_pieces(fn, queries: tuple[Array, ...], ids: Array, start: Array):
    """`fn(queries, ids, start)` on a few queries at a time. Arrays of `queries` and the first
    result have them on axis 3; other results are summed."""
    t = ids.shape[1]
    size = next(c for c in range(min(QUERIES, t), 0, -1) if t % c == 0)
    if size == t:
        return fn(queries, ids, start)

    def cut(a: Array, axis: int) -> Array:
        shape = (*a.shape[:axis], t // size, size, *a.shape[axis + 1 :])
        return jnp.moveaxis(a.reshape(shape), axis, 0)

    def body(sums, piece):
        parts, *new = fn(*piece)
        return jax.tree.map(jnp.add, sums, tuple(new)), parts

    pieces = (
        tuple(cut(a, 3) for a in queries), cut(ids, 1), start + size * jnp.arange(t // size)
    )  # fmt: skip
    shapes = jax.eval_shape(fn, *jax.tree.map(lambda a: a[0], pieces))[1:]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums, parts = lax.scan(body, zeros, pieces)
    joined = jax.tree.map(
        lambda a: jnp.moveaxis(a, 0, 3).reshape(*a.shape[1:4], t, *a.shape[5:]), parts
    )
    return joined, *sums


def _add_block(q: Array, ids: Array, start: Array, kv, sums):
    """Online softmax: (out, top, total) of the queries after one more chunk of keys."""
    k, v, k_ids, k_start = kv

    def some(queries, ids, start):
        q, out, top, total = queries
        scores = _scores(q, k, ids, k_ids, start, k_start)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        probs = jnp.exp(scores - new_top[..., None])
        keep = jnp.exp(top - new_top)
        new = jnp.einsum("bkgts,bskh->bkgth", probs.astype(v.dtype), v,
                         preferred_element_type=jnp.float32)  # fmt: skip
        total = total * keep + jnp.sum(probs, axis=-1)
        return ((out * keep[..., None] + new, new_top, total),)

    return _in_pieces(some, (q, *sums), ids, start)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(ways: int, scale: float, q: Array, k: Array, v: Array, ids: Array) -> Array:
    """q [C, B, K, G, t, H]; k, v [C, B, t, K, H]; ids [C, B, t], with C chunks a device."""
    return _forward(ways, scale, q, k, v, ids)[0]


def _forward(ways: int, scale: float, q: Array, k: Array, v: Array, ids: Array):
    count, t = ids.shape[0], ids.shape[2]
    rank = lax.axis_index(AXIS)
    mine = _chunks(ways, rank, count)
    scaled = q * scale

    def visit(step: Array | int, kv, sums):
        theirs = _chunks(ways, (rank - step) % ways, count)
        for i in range(count):
            for j in range(count):
                block = (*(a[j] for a in kv), theirs[j] * t)
                add = partial(_add_block, scaled[i], ids[i], mine[i] * t, block)
                sums[i] = lax.cond(mine[i] >= theirs[j], add, lambda s: s, sums[i])
        return sums

    def body(carry, step: Array):
        kv, sums = carry
        return (_rotated(ways, kv), visit(step, kv, sums)), None

    shape = q.shape[1:-1]
    zeros = jnp.zeros((*shape, q.shape[-1]), jnp.float32)
    start = [(zeros, jnp.full(shape, MASKED, jnp.float32), zeros[..., 0])] * count
    (kv, sums), _ = lax.scan(body, ((k, v, ids), start), jnp.arange(ways - 1))
    sums = visit(ways - 1, kv, sums)
    out = jnp.stack([o / total[..., None] for o, _, total in sums]).astype(q.dtype)
    log_sums = jnp.stack([top + jnp.log(total) for _, top, total in sums])
    out, log_sums = (checkpoint_name(a, ATTENTION) for a in (out, log_sums))
    return out, (q, k, v, ids, out, log_sums)


def _block_gradients(scale: float, queries, ids: Array, start: Array, kv):
    """(dq, dk, dv) in float32 of one pair of chunks."""
    k, v, k_ids, k_start = kv

    def some(queries, ids, start):
        q, g, inner, log_sums = queries
        scores = _scores(q * scale, k, ids, k_ids, start, k_start)
        probs = jnp.exp(scores - log_sums[..., None])
        wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
        dv = wide("bkgts,bkgth->bskh", probs.astype(g.dtype), g)
        dprobs = wide("bkgth,bskh->bkgts", g, v)
        dscores = (probs * (dprobs - inner[..., None]) * scale).astype(q.dtype)
        dq = wide("bkgts,bskh->bkgth", dscores, k)
        return (dq,), wide("bkgts,bkgth->bskh", dscores, q), dv

    (dq,), dk, dv = _in_pieces(some, queries, ids, start)
    return dq, dk, dv


def _backward(ways: int, scale: float, kept: tuple[Array, ...], g: Array):
    q, k, v, ids, out, log_sums = kept
    count, t = ids.shape[0], ids.shape[2]
    rank = lax.axis_index(AXIS)
    mine = _chunks(ways, rank, count)
    inner = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)
    queries = (q, g.astype(q.dtype), inner, log_sums)

    def body(carry, step: Array):
        kv, dq, dk, dv = carry
        theirs = _chunks(ways, (rank - step) % ways, count)
        for i in range(count):
            for j in range(count):
                block = (*(a[j] for a in kv), theirs[j] * t)
                pair = tuple(a[i] for a in queries)

                def add(sums, pair=pair, i=i, block=block):
                    new = _block_gradients(scale, pair, ids[i], mine[i] * t, block)
                    return tuple(map(jnp.add, sums, new))

                sums = (dq[i], dk[j], dv[j])
                dq[i], dk[j], dv[j] = lax.cond(mine[i] >= theirs[j], add, lambda s: s, sums)
        return (_rotated(ways, kv), dq, *_rotated(ways, (dk, dv))), None

    zeros = lambda a: [jnp.zeros(a.shape[1:], jnp.float32)] * count  # noqa: E731
    start = ((k, v, ids), zeros(q), zeros(k), zeros(v))
    (_, dq, dk, dv), _ = lax.scan(body, start, jnp.arange(ways))
    grads = (jnp.stack(d).astype(like.dtype) for d, like in ((dq, q), (dk, k), (dv, v)))
    return *grads, None


_ring.defvjp(_forward, _backward)
