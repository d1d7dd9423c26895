"""State spaces of Mamba-2 for TPUs (https://arxiv.org/abs/2405.21060): Pallas kernels that go chunk
by chunk over a row and hold the memories of several heads of a group in vector memory.

    grid (row, heads, chunk)    forward     out, and for the way back: memories before the chunks
                                backward    from the last chunk to the first

The heads of a step lie side by side in the lanes, [L, R H], as they come from the layer's products,
so that one product with c or b serves all of them. Only what tokens of a chunk give each other is
computed head by head. A chunk is that of `nn.ssd`. With A_ts = dy_t.(dt_s x_s) and C_ts = c_t.b_s,

    dc = (sum of A D) b + D_t0 S dy        db = (sum of A D)^T c + E dS (dt x)
    d(dt x) = (C D)^T dy + E dS^T b        E_s = D from s to the end

Of the gates it gives derivatives by the sums of g up to each token, and by dt.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lmwright.core.compute import ATTENTION, LANES
from lmwright.kernels.mlstm_marks import NEVER
from lmwright.kernels.tpu_chunks import (
    CARRIED,
    FIRST,
    INPUT,
    LAST,
    TILE,
    TOTAL,
    Chunk,
    like,
    pairs,
    start,
)
from lmwright.kernels.tpu_delta_rule import gates_by, marks_of, since
from lmwright.kernels.tpu_row_attention import VECTOR_MEMORY, Ref, dot

FORWARD, BACKWARD = "ssd_fwd", "ssd_bwd"
SIZES = (64, 128, 256)  # tokens of a chunk
TOGETHER = 8  # heads


@dataclass(frozen=True)
class Call:
    """Calls of kernels, for rows [B, T, .] of N heads."""

    size: int
    """Tokens of a chunk."""
    num_heads: int
    num_groups: int
    interpret: Any = False

    @property
    def heads(self) -> int:
        """Heads of a step, all of one group."""
        of_group = self.num_heads // self.num_groups
        return max(n for n in range(1, TOGETHER + 1) if of_group % n == 0)

    @property
    def steps(self) -> int:
        """Steps for all heads."""
        return self.num_heads // self.heads

    def fits(self, length: int, key_dim: int, head_dim: int, itemsize: int) -> bool:
        """True if rows are chunks of whole tiles, for which the backward pass has room."""
        if length % self.size or self.size not in SIZES or key_dim % TILE or head_dim % TILE:
            return False
        width = self.heads * head_dim
        whole = self.steps == 1 or (width % LANES == 0 and key_dim % LANES == 0)
        return whole and self._vector_memory(key_dim, width, itemsize) <= VECTOR_MEMORY

    def _vector_memory(self, key_dim: int, width: int, itemsize: int) -> int:
        """Bytes of the backward kernel: x, its and the result's gradient and the memories, and c, b
        and their gradients, with the next ones under way; the memories' derivative; and what is
        made of them, and of pairs of tokens."""
        key_dim, width = (-(-dim // LANES) * LANES for dim in (key_dim, width))
        blocks = 2 * itemsize * ((3 * self.size + key_dim) * width + 4 * self.size * key_dim)
        made = 4 * self.size * (8 * width + 3 * key_dim + 5 * self.size)
        return blocks + 4 * key_dim * width + made

    def __call__(
        self,
        kernel: Callable[..., None],
        name: str,
        arrays: Sequence[tuple[str, Array]],
        out: Sequence[tuple[str, jax.ShapeDtypeStruct]],
        state: tuple[int, int],
        *,
        from_last: bool = False,
    ) -> list[Array]:
        """`kernel(*arrays, *out, state)`, each with its kind: `heads` [B, T, .] or `groups` side by
        side, `memory` [B, C, K, .] before a chunk, `gates` [B, N, C, ., L]. The first ones are the
        marks. `state` is the shape of a float32 memory, and chunks come `from_last` to first."""
        b, _, count, *_ = arrays[0][1].shape
        share = self.steps // self.num_groups  # steps of a group

        def spec(kind: str, array: Any) -> pl.BlockSpec:
            parts = self.num_groups if kind == "groups" else self.steps
            width = array.shape[-1] // parts
            block = {
                "gates": (None, self.heads, None, *array.shape[3:]),
                "memory": (None, None, *array.shape[2:3], width),
            }.get(kind, (None, self.size, width))

            def at(b: Array, n: Array, c: Array) -> tuple[Any, ...]:
                c = count - 1 - c if from_last else c
                group = lax.div(n, share)  # `//` asks which TPU this is, which a plan cannot say
                places = {"gates": (b, n, c, 0, 0), "memory": (b, c, 0, n), "groups": (b, c, group)}
                return places.get(kind, (b, c, n))

            return pl.BlockSpec(block, at)

        with jax.named_scope(name):
            return pl.pallas_call(
                kernel,
                name=name,
                grid=(b, self.steps, count),
                in_specs=[spec(*each) for each in arrays],
                out_specs=[spec(*each) for each in out],
                out_shape=[array for _, array in out],
                scratch_shapes=[pltpu.VMEM(state, jnp.float32)],
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "parallel", "arbitrary")
                ),
                interpret=self.interpret,
                metadata={"xprof_metadata": json.dumps({"chunk": self.size})},
            )(*(array for _, array in arrays))


class Heads:
    """The marks of the heads of a step, which lie side by side in arrays [., R H]."""

    def __init__(self, marks: Ref, width: int):
        self.each = [Chunk(marks[n]) for n in range(marks.shape[0])]
        self.width = width // len(self.each)

    def unseen(self) -> Array:
        """float32 [reader, read]: what is added to the exponents of pairs, the same in all heads:
        nothing in one document, where the reader does not come first."""
        return jnp.where(self.each[0].seen(), 0.0, NEVER)

    def unseen_turned(self) -> Array:
        """`unseen` as [read, reader], with which the backward pass has fewer matrices to turn."""
        read, reader = pairs(self.each[0].size)
        first = self.each[0].row(FIRST).astype(jnp.int32)
        return jnp.where((read <= reader) & (read >= first), 0.0, NEVER)

    def of(self, array: Array, n: int) -> Array:
        """[., H] of head n."""
        return array[:, n * self.width : (n + 1) * self.width]

    def wide(self, which: int) -> Array:
        """A mark of tokens [L, R H], for all numbers of their heads."""
        return self._beside([chunk.column(which) for chunk in self.each])

    @property
    def keep(self) -> Array:
        """[1, R H]: the shares of the memories before the chunk that are left after it."""
        return self._beside([chunk.keep for chunk in self.each])

    def _beside(self, columns: list[Array]) -> Array:
        wide = [jnp.broadcast_to(a, (a.shape[0], self.width)) for a in columns]
        return jnp.concatenate(wide, axis=1)


def _forward_kernel(marks: Ref, c: Ref, b: Ref, x: Ref, out: Ref, *refs: Ref) -> None:
    *kept, memory = refs
    start(memory)
    heads, dtype = Heads(marks, x.shape[1]), x.dtype
    written, held = x[...] * heads.wide(INPUT), memory[...].astype(dtype)
    scores, narrow = dot(c[...], b[...], over=(1, 1)), written.astype(dtype)
    near, unseen = [], heads.unseen()
    for n, chunk in enumerate(heads.each):
        decay = jnp.exp(chunk.column(TOTAL) - chunk.row(TOTAL) + unseen)
        near.append(dot((scores * decay).astype(dtype), heads.of(narrow, n)))
    found = heads.wide(CARRIED) * dot(c[...], held)
    out[...] = (jnp.concatenate(near, axis=1) + found).astype(dtype)
    left = (written * heads.wide(LAST)).astype(dtype)
    memory[...] = heads.keep * memory[...] + dot(b[...], left, over=(0, 0))
    for ref in kept:
        ref[...] = held


class Back(NamedTuple):
    """Operands and results of the backward kernel."""

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
    """Derivatives by the sums of g, and by dt, [R, 2, L]."""
    dmemory: Ref


def _backward_kernel(*refs: Ref) -> None:
    of = Back(*refs)
    start(of.dmemory)
    heads, dtype, c, b = Heads(of.marks, of.x.shape[1]), of.x.dtype, of.c[...], of.b[...]
    x, g, held, after = of.x[...], of.g[...], of.held[...], of.dmemory[...]
    step, carried, last, keep = *map(heads.wide, (INPUT, CARRIED, LAST)), heads.keep
    written, read = x * step, g * carried
    narrow, left = written.astype(dtype), written * last
    scores, (token, reader) = dot(b, c, over=(1, 1)), pairs(of.x.shape[0])  # [read, reader]
    by_left, by_read = dot(b, after.astype(dtype)), dot(c, held)  # [L, R H]

    total, by_near, of_pairs = jnp.zeros_like(scores), [], []
    of_others, unseen = jnp.where(token < reader, -scores, 0.0), heads.unseen_turned()
    for n, chunk in enumerate(heads.each):
        own = heads.of(g, n)
        decay = jnp.exp(chunk.row(TOTAL) - chunk.column(TOTAL) + unseen)
        by_pair = dot(heads.of(narrow, n), own, over=(1, 1)) * decay
        by_near.append(dot((scores * decay).astype(dtype), own))
        of_pairs.append(by_pair * of_others)
        total += by_pair
    by_written = jnp.concatenate(by_near, axis=1) + last * by_left
    of.dx[...] = (step * by_written).astype(dtype)
    shares = read * by_read, left * by_left, x * by_written
    of_memory = keep * after * held
    for n, chunk in enumerate(heads.each):
        kept = jnp.sum(heads.of(of_memory, n))
        each = (of_pairs[n], *(heads.of(a, n) for a in shares))
        of.from_gates[n] = gates_by(chunk, each, kept)

    total, read, left = total.astype(dtype), read.astype(dtype), left.astype(dtype)
    dc = dot(total, b, over=(0, 0)) + dot(read, held, over=(1, 1))
    db = dot(total, c) + dot(left, after.astype(dtype), over=(1, 1))
    of.dc[...], of.db[...] = dc.astype(dtype), db.astype(dtype)
    of.dmemory[...] = keep * after + dot(c, read, over=(0, 0))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix(call: Call, c: Array, b: Array, x: Array, dt: Array, g: Array, ids: Array) -> Array:
    """y [B, T, N H] of c and b [B, T, G K] and x [B, T, N H]; dt and g are [B, T, N], ids
    [B, T]."""
    arrays, state = _operands(call, c, b, x, dt, g, ids)
    return call(_forward_kernel, FORWARD, arrays, [("heads", like(x))], state)[0]


def _forward(call: Call, c: Array, b: Array, x: Array, dt: Array, g: Array, ids: Array):
    arrays, state = _operands(call, c, b, x, dt, g, ids)
    held = (len(x), x.shape[1] // call.size, state[0], x.shape[2])
    out = [("heads", like(x)), ("memory", jax.ShapeDtypeStruct(held, x.dtype))]
    y, before = call(_forward_kernel, FORWARD, arrays, out, state)
    return checkpoint_name(y, ATTENTION), (c, b, x, dt, g, ids, before)


def _backward(call: Call, residuals: tuple[Array, ...], grad: Array):
    *inputs, held = residuals
    _, b, x, _, g, ids = inputs
    arrays, state = _operands(call, *inputs)
    rows, heads, count, _, size = arrays[0][1].shape
    gates = jax.ShapeDtypeStruct((rows, heads, count, 2, size), jnp.float32)
    part = jax.ShapeDtypeStruct((*b.shape[:2], call.steps * state[0]), b.dtype)
    arrays += [("heads", grad.astype(x.dtype)), ("memory", held)]
    out = [("heads", part), ("heads", part), ("heads", like(x)), ("gates", gates)]
    dc, db, dx, of_gates = call(_backward_kernel, BACKWARD, arrays, out, state, from_last=True)

    def summed(parts: Array) -> Array:
        """[B, T, G K] of the parts of all steps of a group."""
        apart = parts.reshape(*b.shape[:2], call.num_groups, -1, state[0]).astype(jnp.float32)
        return jnp.sum(apart, axis=3).astype(b.dtype).reshape(b.shape)

    _, turned = jax.vjp(lambda g: since(g, ids, call.size), g)
    by_token = jnp.moveaxis(of_gates[..., 1, :].reshape(rows, heads, -1), 1, 2)
    return summed(dc), summed(db), dx, by_token, *turned(of_gates[..., 0, :]), None


mix.defvjp(_forward, _backward)


def _operands(
    call: Call, c: Array, b: Array, x: Array, dt: Array, g: Array, ids: Array
) -> tuple[list[tuple[str, Array]], tuple[int, int]]:
    """Arrays that both kernels read, and the shape of the memories of a step."""
    told = marks_of(call.size, dt, g, ids)
    state = b.shape[2] // call.num_groups, x.shape[2] // call.steps
    return [("gates", told), ("groups", c), ("groups", b), ("heads", x)], state


def ssd(
    c: Array, b: Array, x: Array, dt: Array, g: Array, ids: Array, chunk_tokens: int,
    *, interpret: Any = False,
) -> Array | None:  # fmt: skip
    """`nn.ssd.ssd` of a device's own rows and heads; None for what does not fit."""
    call = Call(min(chunk_tokens, x.shape[1]), x.shape[2], b.shape[2], interpret)
    if not call.fits(x.shape[1], b.shape[3], x.shape[3], x.dtype.itemsize):
        return None
    flat = [a.reshape(*a.shape[:2], -1) for a in (c, b, x)]
    return mix(call, *flat, dt, g, ids).reshape(x.shape)
