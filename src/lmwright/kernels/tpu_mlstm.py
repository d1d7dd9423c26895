"""mLSTM for TPUs (https://arxiv.org/abs/2405.04517): Pallas kernels that go chunk by chunk over a
row of a head and hold its memory in vector memory.

    grid (row, head, chunk)      forward           out, and n q of each token
                                 states            memories before the chunks, for the way back
                                 backward          from the last chunk to the first

A chunk is computed as in `nn.mlstm`, of what `mlstm_marks` says of the gates; weights of pairs of
tokens never leave the chip. The backward pass makes them again, and the memories before each chunk,
which take less memory so. With N / D the result of a token before it is divided by e^m, an
input gate only ever stands beside its key, and forget gates beside queries and keys:

    di_s = k_s dk_s      d(sum of log f up to t) = q_t dq_t - k_t dk_t

and the scale m drops out but for the epsilon of the denominator, whose part goes through the
scales. Formulas of chunks: https://arxiv.org/abs/2503.14376.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from lmwright.core.compute import ATTENTION, LANES
from lmwright.core.sharding import by_shard
from lmwright.kernels import mlstm_marks
from lmwright.kernels.tpu_chunks import (
    CARRIED,
    INPUT,
    LAST,
    MORE,
    MOST,
    SCALE,
    SHORTEST,
    TILE,
    TOTAL,
    Call,
    Chunk,
    like,
    start,
)
from lmwright.kernels.tpu_row_attention import VECTOR_MEMORY, Ref, dot
from lmwright.nn import mlstm as reference
from lmwright.nn.mlstm import EPS

FORWARD, STATES, BACKWARD = "mlstm_fwd", "mlstm_states", "mlstm_bwd"


def fits(length: int, size: int, key_dim: int, head_dim: int, itemsize: int) -> bool:
    """True if rows are chunks of whole tiles, for which the backward pass has room."""
    if length % size or size % SHORTEST or key_dim % TILE or head_dim % TILE:
        return False
    key_dim, head_dim = (-(-dim // LANES) * LANES for dim in (key_dim, head_dim))
    return _vector_memory(size, key_dim, head_dim, itemsize) <= VECTOR_MEMORY


def _vector_memory(size: int, key_dim: int, head_dim: int, itemsize: int) -> int:
    """Bytes of the backward kernel: four inputs, three outputs and a memory with the next ones
    under way, the memory's derivative twice, and three times each, what is made of the tokens and
    of their pairs."""
    blocks = 2 * itemsize * (size * (4 * key_dim + 3 * head_dim) + key_dim * head_dim)
    made = 3 * 4 * size * (size + key_dim + head_dim) // 2
    return blocks + 2 * 4 * key_dim * head_dim + made


def weights(chunk: Chunk) -> Array:
    """float32 [reader, read]: of tokens for each other."""
    exponent = chunk.column(TOTAL) - chunk.row(TOTAL) + (chunk.row(INPUT) - chunk.column(SCALE))
    return jnp.exp(jnp.where(chunk.seen(), exponent, mlstm_marks.NEVER))


def as_row(column: Array) -> Array:
    """[1, L] of a column [L, 1]."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1, :]


def row_sums(x: Array) -> Array:
    """Sums [1, L] of x [L, .] over its lanes."""
    return as_row(jnp.sum(x, axis=1, keepdims=True))


def _add_chunk(chunk: Chunk, k: Ref, v: Ref, memory: Ref, norm: Ref) -> None:
    """The memory after the chunk in the place of the one before."""
    written = k[...] * chunk.column(LAST)
    memory[...] = chunk.keep * memory[...] + dot(written.astype(k.dtype), v[...], over=(0, 0))
    norm[...] = chunk.keep * norm[...] + jnp.sum(written, axis=0, keepdims=True)


def _forward_kernel(marks: Ref, q: Ref, k: Ref, v: Ref, out: Ref, along: Ref, *state: Ref) -> None:
    start(*state)
    memory, norm = state
    chunk, queries = Chunk(marks[...]), q[...]
    scores = dot(queries, k[...], over=(1, 1)) * weights(chunk)
    carried = chunk.column(CARRIED)
    read = jnp.sum(queries * norm[...], axis=1, keepdims=True)
    read = jnp.sum(scores, axis=1, keepdims=True) + carried * read
    h = dot(scores.astype(v.dtype), v[...])
    h += carried * dot(queries, memory[...].astype(q.dtype))
    out[...] = (h / (jnp.maximum(jnp.abs(read), chunk.column(MORE)) + EPS)).astype(out.dtype)
    along[...] = as_row(read)
    _add_chunk(chunk, k, v, memory, norm)


def _states_kernel(marks: Ref, k: Ref, v: Ref, memories: Ref, norms: Ref, *state: Ref) -> None:
    start(*state)
    memory, norm = state
    memories[...], norms[...] = memory[...].astype(memories.dtype), norm[...]
    _add_chunk(Chunk(marks[...]), k, v, memory, norm)


def _backward_kernel(*refs: Ref) -> None:
    marks, q, k, v, g, memory, norm, dq, dk, dv, from_q, from_k, dmemory, dnorm = refs
    start(dmemory, dnorm)
    chunk, dtype = Chunk(marks[...]), q.dtype
    among, last, carried = weights(chunk), chunk.column(LAST), chunk.column(CARRIED)
    dalong = chunk.column(MOST)
    dh = (g[...] * chunk.column(MORE)).astype(dtype)
    scores = dot(q[...], k[...], over=(1, 1)) * among
    dscores = ((dot(dh, v[...], over=(1, 1)) + dalong) * among).astype(dtype)
    after = dmemory[...].astype(dtype)

    by_query = dot(dh, memory[...], over=(1, 1)) + dalong * norm[...]
    by_query = dot(dscores, k[...]) + carried * by_query
    by_key = dot(v[...], after, over=(1, 1)) + dnorm[...]
    by_key = dot(dscores, q[...], over=(0, 0)) + last * by_key
    by_value = dot(scores.astype(dtype), dh, over=(0, 0))
    dv[...] = (by_value + dot((k[...] * last).astype(dtype), after)).astype(dtype)
    dq[...], dk[...] = by_query.astype(dtype), by_key.astype(dtype)
    from_q[...], from_k[...] = row_sums(q[...] * by_query), row_sums(k[...] * by_key)

    read = q[...] * carried
    dmemory[...] = chunk.keep * dmemory[...] + dot(read.astype(dtype), dh, over=(0, 0))
    dnorm[...] = chunk.keep * dnorm[...] + jnp.sum(read * dalong, axis=0, keepdims=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix(call: Call, q: Array, k: Array, v: Array, i: Array, f: Array, ids: Array) -> Array:
    """h [B, N, T, H] of scaled q and k [B, N, T, K], v [B, N, T, H]; i and f [B, T, N], ids
    [B, T]."""
    return _forward(call, q, k, v, i, f, ids)[0]


def _forward(call: Call, q: Array, k: Array, v: Array, i: Array, f: Array, ids: Array):
    where = mlstm_marks.places(ids, call.size)
    i_log, f_log = mlstm_marks.log_gates(i, f, ids, call.size)
    scaled = mlstm_marks.scales(i_log, f_log, where)
    floor = jnp.exp(-scaled[1])
    told = mlstm_marks.marks(i_log, scaled, where).stacked(floor, jnp.zeros_like(floor))
    sums = jax.ShapeDtypeStruct((*i_log.shape[:3], 1, call.size), jnp.float32)
    state = _state(k, v)
    h, along = call(_forward_kernel, FORWARD, (told, q, k, v), [like(v), sums], state)
    h, along = (checkpoint_name(a, ATTENTION) for a in (h, along))
    return h, (q, k, v, i, f, ids, h, along)


def _backward(call: Call, residuals: tuple[Array, ...], g: Array):
    q, k, v, i, f, ids, h, along = residuals
    where = mlstm_marks.places(ids, call.size)
    (i_log, f_log), to_gates = jax.vjp(
        lambda i, f: mlstm_marks.log_gates(i, f, ids, call.size), i, f
    )

    def scales(i_log: Array, f_log: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        scaled = mlstm_marks.scales(i_log, f_log, where)
        return scaled[1], scaled

    scale, to_scales, scaled = jax.vjp(scales, i_log, f_log, has_aux=True)
    along, floor = along[..., 0, :], jnp.exp(-scale)
    above = 1 / (jnp.maximum(jnp.abs(along), floor) + EPS)
    inner = jnp.sum(h.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)
    inner = inner.reshape(scale.shape) * above
    dalong = jnp.where(jnp.abs(along) >= floor, -inner * jnp.sign(along), 0.0)
    told = mlstm_marks.marks(i_log, scaled, where).stacked(above, dalong)

    b, n, count, size = i_log.shape
    state = _state(k, v)
    before = [
        jax.ShapeDtypeStruct((b, n, count, *dims), dtype)
        for dims, dtype in zip(state, (q.dtype, jnp.float32), strict=True)
    ]
    memories = call(_states_kernel, STATES, (told, k, v), before, state)
    sums = jax.ShapeDtypeStruct((b, n, count, 1, size), jnp.float32)
    arrays = (told, q, k, v, g.astype(q.dtype), *memories)
    out = [*map(like, (q, k, v)), sums, sums]
    gradients = call(_backward_kernel, BACKWARD, arrays, out, state, from_last=True)
    dq, dk, dv, from_q, from_k = gradients

    from_q, from_k = from_q[..., 0, :], from_k[..., 0, :]
    by_scale = to_scales(-EPS * inner)
    di = from_k + by_scale[0]
    df = mlstm_marks.sums_after(from_q - from_k, where) + by_scale[1]
    return dq, dk, dv, *to_gates((di, df)), None


mix.defvjp(_forward, _backward)


def _state(k: Array, v: Array) -> list[tuple[int, ...]]:
    """Shapes of a memory and of its norm."""
    return [(k.shape[-1], v.shape[-1]), (1, k.shape[-1])]


def mlstm(
    q: Array, k: Array, v: Array, i: Array, f: Array, ids: Array, chunk_tokens: int,
    *, interpret: Any = False,
) -> Array:  # fmt: skip
    """mLSTM over the mesh that is set, as `nn.mlstm.mlstm`, which also takes what does not fit."""
    size = min(chunk_tokens, q.shape[1])
    if not fits(q.shape[1], size, q.shape[3], v.shape[3], q.dtype.itemsize):
        return reference.mlstm(q, k, v, i, f, ids, chunk_tokens)

    def local(q: Array, k: Array, v: Array, ids: Array, i: Array, f: Array) -> Array:
        q, k, v = (jnp.moveaxis(a, 1, 2) for a in (q * q.shape[-1] ** -0.5, k, v))
        return jnp.moveaxis(mix(Call(size, interpret=interpret), q, k, v, i, f, ids), 1, 2)

    gates = "batch seq heads"
    return by_shard(local, gates, gates)(q, k, v, ids, i, f)
