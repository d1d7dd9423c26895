"""State spaces of Mamba-2 for TPUs (https://arxiv.org/abs/2405.21060): Pallas kernels that go chunk
by chunk over a row and hold the memories of several heads of a group in vector memory.

    grid (row, heads, chunk)    forward     out, and for the way back: memories before the chunks
                                backward    from the last chunk to the first

A chunk is computed as in `nn.ssd`; weights of pairs of tokens never leave the chip, and the product
of c and b is made once for all heads of a step. With A_ts = dy_t.(dt_s x_s), the backward pass has

    dc = (A D) b + D_t0 S dy        db = (A D)^T c + E dS (dt x)        E_s = D from s to the end
    d(dt x) = (C D)^T dy + E dS^T b          C_ts = c_t.b_s

Of the gates it gives derivatives by the sums of g up to each token, and by dt.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from lmwright.core.compute import ATTENTION, LANES
from lmwright.kernels.tpu_chunks import CARRIED, INPUT, LAST, TILE, Call, Chunk, like, pairs, start
from lmwright.kernels.tpu_delta_rule import decay_of, marks_of, since, state_of, write_gates
from lmwright.kernels.tpu_row_attention import VECTOR_MEMORY, Ref, dot

FORWARD, BACKWARD = "ssd_fwd", "ssd_bwd"
SIZES = (64, 128, 256)  # tokens of a chunk
TOGETHER = 8  # heads, which share the product of c and b


def fits(length: int, size: int, heads: int, key_dim: int, head_dim: int, itemsize: int) -> bool:
    """True if rows are chunks of whole tiles, for which the backward pass of `heads` heads has
    room."""
    if length % size or size not in SIZES or key_dim % TILE or head_dim % TILE:
        return False
    key_dim, head_dim = (-(-dim // LANES) * LANES for dim in (key_dim, head_dim))
    return _vector_memory(size, heads, key_dim, head_dim, itemsize) <= VECTOR_MEMORY


def _vector_memory(size: int, heads: int, key_dim: int, head_dim: int, itemsize: int) -> int:
    """Bytes of the backward kernel: x, its and the result's gradient and a memory of each head, and
    c, b and their gradients, with the next ones under way; the memories' derivatives; and what is
    made of a head."""
    blocks = (
        2 * itemsize * (heads * (3 * size * head_dim + key_dim * head_dim) + 4 * size * key_dim)
    )
    made = 4 * size * (4 * size + 3 * key_dim + 3 * head_dim)
    return blocks + 4 * heads * key_dim * head_dim + made


def heads_together(heads: int) -> int:
    """Heads in one step, of the `heads` of a group."""
    return max(n for n in range(1, TOGETHER + 1) if heads % n == 0)


def _forward_kernel(marks: Ref, c: Ref, b: Ref, x: Ref, out: Ref, *refs: Ref) -> None:
    *kept, memory = refs
    start(memory)
    dtype = x.dtype
    scores = dot(c[0], b[0], over=(1, 1))  # [L, L]
    for n in range(x.shape[0]):
        chunk, held = Chunk(marks[n]), memory[n].astype(dtype)
        written = x[n] * chunk.column(INPUT)
        attends = (scores * decay_of(chunk)).astype(dtype)
        found = chunk.column(CARRIED) * dot(c[0], held)
        out[n] = (dot(attends, written.astype(dtype)) + found).astype(dtype)
        left = (written * chunk.column(LAST)).astype(dtype)
        memory[n] = chunk.keep * memory[n] + dot(b[0], left, over=(0, 0))
        for ref in kept:
            ref[n] = held


class Back(NamedTuple):
    """Operands and results of the backward kernel, [heads, ., .] each, c and b [1, ., .]."""

    marks: Ref
    c: Ref
    b: Ref
    x: Ref
    g: Ref
    held: Ref
    dc: Ref
    db: Ref
    dx: Ref
    from_gates: Ref
    """Derivatives by the sums of g, and by dt, [heads, 2, L]."""
    dmemory: Ref


def _backward_kernel(*refs: Ref) -> None:
    of = Back(*refs)
    start(of.dmemory)
    scores = dot(of.c[0], of.b[0], over=(1, 1))
    each = [_backward_of_head(of, n, scores) for n in range(of.x.shape[0])]
    of.dc[0], of.db[0] = (sum(parts).astype(of.dc.dtype) for parts in zip(*each, strict=True))


def _backward_of_head(of: Back, n: int, scores: Array) -> tuple[Array, Array]:
    """float32 [L, K] each: gradients of c and b; all others are written."""
    chunk, dtype, c, b = Chunk(of.marks[n]), of.x.dtype, of.c[0], of.b[0]
    x, g, held, after = of.x[n], of.g[n], of.held[n], of.dmemory[n].astype(of.x.dtype)
    step, carried, last = (chunk.column(at) for at in (INPUT, CARRIED, LAST))
    decay, (reader, read) = decay_of(chunk), pairs(chunk.size)
    written = (x * step).astype(dtype)

    by_pair = dot(g, written, over=(1, 1)) * decay  # [L, L]
    narrow = by_pair.astype(dtype)
    found = carried * dot(g, held, over=(1, 1))  # [L, K]
    left = last * dot(written, after, over=(1, 1))
    by_written = dot((scores * decay).astype(dtype), g, over=(0, 0)) + last * dot(b, after)
    of.dx[n] = (step * by_written).astype(dtype)
    write_gates(of, n, chunk, (
        jnp.where(read < reader, by_pair * scores, 0.0), c * found, b * left, x * by_written,
    ))  # fmt: skip
    read_by = (c * carried).astype(dtype)
    of.dmemory[n] = chunk.keep * of.dmemory[n] + dot(read_by, g, over=(0, 0))
    return dot(narrow, b) + found, dot(narrow, c, over=(0, 0)) + left


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix(call: Call, c: Array, b: Array, x: Array, dt: Array, g: Array, ids: Array) -> Array:
    """y [B, N, T, H] of c and b [B, G, T, K] and x [B, N, T, H]; dt and g are [B, T, N], ids
    [B, T]."""
    told = marks_of(call, dt, g, ids)
    return call(_forward_kernel, FORWARD, (told, c, b, x), [like(x)], [state_of(call, b, x)])[0]


def _forward(call: Call, c: Array, b: Array, x: Array, dt: Array, g: Array, ids: Array):
    told, state = marks_of(call, dt, g, ids), state_of(call, b, x)
    held = jax.ShapeDtypeStruct((*told.shape[:3], *state[1:]), x.dtype)
    y, held = call(_forward_kernel, FORWARD, (told, c, b, x), [like(x), held], [state])
    return checkpoint_name(y, ATTENTION), (c, b, x, dt, g, ids, held)


def _backward(call: Call, residuals: tuple[Array, ...], grad: Array):
    c, b, x, dt, g, ids, held = residuals
    told = marks_of(call, dt, g, ids)
    rows, heads, count, _, size = told.shape
    gates = jax.ShapeDtypeStruct((rows, heads, count, 2, size), jnp.float32)
    arrays = told, c, b, x, grad.astype(x.dtype), held
    steps = heads // (call.heads or 1)
    part = jax.ShapeDtypeStruct((rows, steps, *b.shape[2:]), b.dtype)
    out, state = [part, part, like(x), gates], [state_of(call, b, x)]
    dc, db, dx, gates = call(_backward_kernel, BACKWARD, arrays, out, state, from_last=True)

    def summed(parts: Array) -> Array:
        """[B, G, T, K] of the parts of all steps of a group."""
        parts = parts.reshape(rows, b.shape[1], -1, *b.shape[2:]).astype(jnp.float32)
        return jnp.sum(parts, axis=2).astype(b.dtype)

    _, turned = jax.vjp(lambda g: since(g, ids, call.size), g)
    by_token = jnp.moveaxis(gates[..., 1, :].reshape(rows, heads, -1), 1, 2)
    return summed(dc), summed(db), dx, by_token, *turned(gates[..., 0, :]), None


mix.defvjp(_forward, _backward)


def ssd(
    c: Array, b: Array, x: Array, dt: Array, g: Array, ids: Array, chunk_tokens: int,
    *, interpret: Any = False,
) -> Array | None:  # fmt: skip
    """`nn.ssd.ssd` of a device's own rows and heads; None for what does not fit."""
    size = min(chunk_tokens, x.shape[1])
    heads = heads_together(x.shape[2] // b.shape[2])
    if not fits(x.shape[1], size, heads, b.shape[3], x.shape[3], x.dtype.itemsize):
        return None
    c, b, x = (jnp.moveaxis(a, 1, 2) for a in (c, b, x))
    return jnp.moveaxis(mix(Call(size, heads, interpret), c, b, x, dt, g, ids), 1, 2)
