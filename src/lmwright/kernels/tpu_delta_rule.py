"""The gated delta rule for TPUs (https://arxiv.org/abs/2412.06464): Pallas kernels that go chunk by
chunk over a row and hold the memories of several heads in vector memory.

    grid (row, heads, chunk)    forward     out, and for the way back: memories before the chunks,
                                            inverted matrices, what tokens write
                                backward    from the last chunk to the first

A chunk is computed as in `nn.delta_rule`, but the memory's part goes through the inverse together
with the values:

    new = (I + A)^-1 x      x = b (v - D_t0 S^T k)      A_ts = b_t k_t.k_s D_ts where s < t

so that dx = (I + A)^-T dnew and dA = -dx new^T. Of the gates the backward kernel gives derivatives
by the sums of g up to each token, and by log b, which is dx.new.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from lmwright.core.compute import ATTENTION, LANES
from lmwright.kernels import mlstm_marks
from lmwright.kernels.mlstm_marks import NEVER
from lmwright.kernels.tpu_chunks import (
    CARRIED,
    INPUT,
    LAST,
    TILE,
    TOTAL,
    Call,
    Chunk,
    like,
    pairs,
    start,
)
from lmwright.kernels.tpu_row_attention import VECTOR_MEMORY, Ref, dot

FORWARD, BACKWARD = "delta_rule_fwd", "delta_rule_bwd"
SIZES = (64, 128)  # tokens of a chunk; of more, what is under way does not fit the registers
TOGETHER = 4  # heads, whose products fill each other's waits
Halves = tuple[Array, ...]


def fits(length: int, size: int, heads: int, key_dim: int, head_dim: int, itemsize: int) -> bool:
    """True if rows are chunks of whole tiles, for which the backward pass of `heads` heads has
    room."""
    if length % size or size not in SIZES or key_dim % TILE or head_dim % TILE:
        return False
    widest = -(-max(key_dim, head_dim, size) // LANES) * LANES
    return heads * _vector_memory(size, widest, itemsize) <= VECTOR_MEMORY


def _vector_memory(size: int, width: int, itemsize: int) -> int:
    """Bytes of a head in the backward kernel: four inputs and three outputs by token, its matrix
    and its memory, with the next ones under way; the memory's derivative; and what is made."""
    blocks = 2 * itemsize * width * (7 * size + size + width)
    return blocks + 4 * width * (width + 8 * size)


def heads_together(keys: int, times: int) -> int:
    """Heads of values in one step, of `keys` heads of keys, each of which has `times` of them."""
    return times * max(
        n for n in range(1, keys + 1) if keys % n == 0 and (n == 1 or n * times <= TOGETHER)
    )


def decay_of(chunk: Chunk) -> Array:
    """float32 [reader, read]: D, one for a token itself."""
    reader, read = pairs(chunk.size)
    apart = jnp.where(reader == read, 0.0, chunk.column(TOTAL) - chunk.row(TOTAL))
    return jnp.exp(jnp.where(chunk.seen(), apart, NEVER))


def halves(a: Array, dtype: jnp.dtype) -> Halves:
    """A float32 matrix as the sum of two bfloat16, or itself beside inputs of float32."""
    if dtype == jnp.float32:
        return (a,)
    high = a.astype(jnp.bfloat16)
    return high, (a - high.astype(jnp.float32)).astype(jnp.bfloat16)


def product(a: Halves, b: Halves) -> Array:
    """The float32 product of two float32 matrices, by three products of halves."""
    if len(a) == 1:
        return jnp.dot(a[0], b[0], precision=lax.Precision.HIGHEST)
    return dot(a[0], b[0]) + (dot(a[0], b[1]) + dot(a[1], b[0]))


def inverses(matrices: list[Array], dtype: jnp.dtype) -> list[Array]:
    """(I + a)^-1 of each float32 a [L, L] that is 0 on and above the diagonal, as in
    `nn.delta_rule.inverted`. Several are interleaved, since the products of one matrix wait for
    each other."""
    size = matrices[0].shape[0]
    reader, read = pairs(size)
    split = [halves(a, dtype) for a in matrices]
    beside = (reader ^ read) == 1  # blocks of two
    inverse = [jnp.where(reader == read, 1.0, jnp.where(beside, -a, 0.0)) for a in matrices]
    half = 2
    while half < size:
        below = ((reader ^ read) & -half) == half  # in one block, in different halves of it
        now = [halves(a, dtype) for a in inverse]
        parts = [tuple(jnp.where(below, h, 0) for h in a) for a in split]
        lower = [_lower(a, half) for a in inverse]
        left = [product(halves(a, dtype), b) for a, b in zip(lower, parts, strict=True)]
        change = [product(halves(a, dtype), b) for a, b in zip(left, now, strict=True)]
        inverse = [_less(a, b, half) for a, b in zip(inverse, change, strict=True)]
        half *= 2
    return inverse


def _lower(a: Array, half: int) -> Array:
    """The rows of a [L, L] in the lower halves of blocks, which alone change; all rows if they are
    not whole tiles."""
    if half < 8:
        return a
    starts = range(half, a.shape[0], 2 * half)
    return jnp.concatenate([a[at : at + half] for at in starts])


def _less(a: Array, change: Array, half: int) -> Array:
    """a [L, L] less the change of `_lower` rows."""
    if half < 8:
        return a - change
    pieces = []
    for i, at in enumerate(range(0, a.shape[0], 2 * half)):
        middle, end = at + half, at + 2 * half
        pieces += [a[at:middle], a[middle:end] - change[i * half : (i + 1) * half]]
    return jnp.concatenate(pieces)


def _forward_kernel(marks: Ref, q: Ref, k: Ref, v: Ref, out: Ref, *refs: Ref) -> None:
    *kept, memory = refs
    start(memory)
    (heads, size, _), dtype, every = v.shape, v.dtype, range(v.shape[0])
    key_of = [n // (heads // k.shape[0]) for n in every]
    both = [jnp.concatenate([q[j], k[j]]) for j in range(k.shape[0])]  # [2 L, K]
    scores = [dot(both[j], k[j], over=(1, 1)) for j in range(k.shape[0])]  # [2 L, L]
    chunks = [Chunk(marks[n]) for n in every]
    decays = [decay_of(chunk) for chunk in chunks]
    held = [memory[n].astype(dtype) for n in every]
    reader, read = pairs(size)
    depends = [chunks[n].column(INPUT) * scores[key_of[n]][size:] * decays[n] for n in every]
    inverse = inverses([jnp.where(read < reader, a, 0.0) for a in depends], dtype)
    inverse = [a.astype(dtype) for a in inverse]
    # head after head in each step, not step after step: waits fill up so
    carried = [jnp.concatenate([chunk.column(CARRIED)] * 2) for chunk in chunks]
    found = [carried[n] * dot(both[key_of[n]], held[n]) for n in every]  # [2 L, H]
    x = [chunks[n].column(INPUT) * (v[n] - found[n][size:]) for n in every]
    new = [dot(inverse[n], x[n].astype(dtype)).astype(dtype) for n in every]
    for n in every:
        attends = (scores[key_of[n]][:size] * decays[n]).astype(dtype)
        out[n] = (found[n][:size] + dot(attends, new[n])).astype(dtype)
        left = (k[key_of[n]] * chunks[n].column(LAST)).astype(dtype)
        memory[n] = chunks[n].keep * memory[n] + dot(left, new[n], over=(0, 0))
        for ref, values in zip(kept, (held, inverse, new), strict=False):  # or none is kept
            ref[n] = values[n]


class Back(NamedTuple):
    """Operands and results of the backward kernel, [heads, ., .] each."""

    marks: Ref
    q: Ref
    k: Ref
    g: Ref
    held: Ref
    inverse: Ref
    new: Ref
    dq: Ref
    dk: Ref
    dv: Ref
    from_gates: Ref
    """Derivatives by the sums of g, and by log b, [heads, 2, L]."""
    dmemory: Ref


def _backward_kernel(*refs: Ref) -> None:
    of = Back(*refs)
    start(of.dmemory)
    keys, size = of.k.shape[0], of.k.shape[1]
    times = of.g.shape[0] // keys
    for j in range(keys):
        both = jnp.concatenate([of.q[j], of.k[j]])  # [2 L, K]
        scores = dot(both, of.k[j], over=(1, 1))  # [2 L, L]
        heads = range(j * times, (j + 1) * times)
        total = sum(_backward_of_head(of, n, both, scores) for n in heads)
        of.dq[j], of.dk[j] = total[:size].astype(of.dq.dtype), total[size:].astype(of.dk.dtype)


def _backward_of_head(of: Back, n: int, both: Array, scores: Array) -> Array:
    """float32 [2 L, K]: gradients of queries and of keys; all others are written."""
    chunk, dtype, size = Chunk(of.marks[n]), both.dtype, both.shape[0] // 2
    q, k, g, new, after = both[:size], both[size:], of.g[n], of.new[n], of.dmemory[n]
    write, carried, last = (chunk.column(at) for at in (INPUT, CARRIED, LAST))
    decay, (reader, read) = decay_of(chunk), pairs(size)
    before = read < reader

    attends = (scores[:size] * decay).astype(dtype)
    dnew = dot(attends, g, over=(0, 0))
    dnew += dot((k * last).astype(dtype), after.astype(dtype))
    dx = dot(of.inverse[n], dnew.astype(dtype), over=(0, 0))
    of.dv[n] = (write * dx).astype(dtype)

    both_g = jnp.concatenate([g, dx.astype(dtype)])
    by_pair = dot(both_g, new, over=(1, 1))  # [2 L, L]
    dqk = by_pair[:size] * decay
    dkk = jnp.where(before, -write * by_pair[size:] * decay, 0.0)
    found = jnp.concatenate([carried * g, -write * carried * dx]).astype(dtype)
    by_found = dot(found, of.held[n], over=(1, 1))  # [2 L, K]
    written = last * dot(new, after.astype(dtype), over=(1, 1))
    by_query = dot(dqk.astype(dtype), k)
    by_key = dot(dqk.astype(dtype), q, over=(0, 0)) + dot((dkk + dkk.T).astype(dtype), k)
    of.from_gates[n] = gates_by(chunk, (
        jnp.where(before, dqk * scores[:size], 0.0) + dkk * scores[size:],
        q * by_found[:size] + k * by_found[size:], k * written, dx * new,
    ), jnp.sum(chunk.keep * after * of.held[n]))  # fmt: skip
    of.dmemory[n] = chunk.keep * after + dot(both, found, over=(0, 0))
    return jnp.concatenate([by_query, by_key + written]) + by_found


def gates_by(chunk: Chunk, shares: tuple[Array, ...], kept: Array) -> Array:
    """Derivatives of the gates [2, L], of shares [L, .]: those of pairs of tokens, of what is found
    in the memory, of what is written there, and of log b; `kept` is that of the memory itself."""
    of_pairs, found, written, logs = shares
    by_row = lambda a: jnp.sum(a, axis=1, keepdims=True)  # noqa: E731
    lasts = by_row(written)
    columns = by_row(of_pairs) + by_row(found) - lasts, by_row(logs)
    lane = lax.broadcasted_iota(jnp.int32, (chunk.size, LANES), 1)
    rows = jnp.where(lane == 0, *columns).T  # [LANES, L]
    place = lax.broadcasted_iota(jnp.int32, (1, chunk.size), 1)
    at_end = jnp.where(place == chunk.size - 1, jnp.sum(lasts) + kept, 0.0)
    of_sums = rows[:1] - jnp.sum(of_pairs, axis=0, keepdims=True) + at_end
    return jnp.concatenate([of_sums, rows[1:2]])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rule(call: Call, q: Array, k: Array, v: Array, b: Array, g: Array, ids: Array) -> Array:
    """o [B, N, T, H] of scaled q and k [B, G, T, K], and v [B, N, T, H]; b and g are [B, T, N],
    ids [B, T]."""
    told = marks_of(call.size, b, g, ids)
    return call(_forward_kernel, FORWARD, (told, q, k, v), [like(v)], [_state(call, k, v)])[0]


def _forward(call: Call, q: Array, k: Array, v: Array, b: Array, g: Array, ids: Array):
    told, state = marks_of(call.size, b, g, ids), _state(call, k, v)
    chunks = told.shape[:3]
    kept = [
        jax.ShapeDtypeStruct((*chunks, *dims), v.dtype) for dims in (state[1:], (call.size,) * 2)
    ]
    out = [like(v), *kept, like(v)]
    o, *rest = call(_forward_kernel, FORWARD, (told, q, k, v), out, [state])
    return checkpoint_name(o, ATTENTION), (q, k, b, g, ids, *rest)


def _backward(call: Call, residuals: tuple[Array, ...], grad: Array):
    q, k, b, g, ids, held, inverse, new = residuals
    told = marks_of(call.size, b, g, ids)
    rows, heads, count, _, size = told.shape
    gates = jax.ShapeDtypeStruct((rows, heads, count, 2, size), jnp.float32)
    arrays = told, q, k, grad.astype(new.dtype), held, inverse, new
    out = [like(q), like(k), like(new), gates]
    state = [_state(call, k, new)]
    dq, dk, dv, gates = call(_backward_kernel, BACKWARD, arrays, out, state, from_last=True)

    _, turned = jax.vjp(lambda g: since(g, ids, call.size), g)
    by_token = jnp.moveaxis(gates[..., 1, :].reshape(rows, heads, -1), 1, 2)
    db = jnp.where(b > 0, by_token / jnp.where(b > 0, b, 1.0), 0.0)
    return dq, dk, dv, db, *turned(gates[..., 0, :]), None


rule.defvjp(_forward, _backward)


def marks_of(size: int, b: Array, g: Array, ids: Array) -> Array:
    """[B, N, C, 8, L]: of strengths and log decays [B, T, N]."""
    total = since(g, ids, size)
    none = jnp.zeros_like(total)
    told = mlstm_marks.marks(none, (total, none, none), mlstm_marks.places(ids, size))
    return told._replace(log_input=mlstm_marks.by_chunk(b, size)).stacked(none, none)


def since(g: Array, ids: Array, size: int) -> Array:
    """[B, N, C, L]: sums of g [B, T, N] since the chunk or, within it, the document began."""
    first, place = mlstm_marks.places(ids, size).first, jnp.arange(size)
    same = (place <= place[:, None]) & (place >= first[..., None])  # [B, C, L, L]
    exact = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    return exact("bcts,bncs->bnct", same.astype(g.dtype), mlstm_marks.by_chunk(g, size))


def _state(call: Call, k: Array, v: Array) -> tuple[int, ...]:
    """Shape of the memories of a step."""
    return call.heads or 1, k.shape[-1], v.shape[-1]


def delta_rule(
    q: Array, k: Array, v: Array, b: Array, g: Array, ids: Array, chunk_tokens: int,
    *, interpret: Any = False,
) -> Array | None:  # fmt: skip
    """`nn.delta_rule.delta_rule` of a device's own rows and heads; None for what does not fit."""
    size, keys = min(chunk_tokens, q.shape[1]), k.shape[2]
    heads = heads_together(keys, v.shape[2] // keys)
    if not fits(q.shape[1], size, heads, k.shape[3], v.shape[3], q.dtype.itemsize):
        return None
    q, k, v = (jnp.moveaxis(a, 1, 2) for a in (q * q.shape[-1] ** -0.5, k, v))
    return jnp.moveaxis(rule(Call(size, heads, interpret), q, k, v, b, g, ids), 1, 2)
