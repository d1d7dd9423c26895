"""Attention for TPUs whose rows do not fit the vector memory: one Pallas kernel each way, which
streams spans of a row from the chip's memory (`tpu_spans` says which).

    forward   grid (row, head, pair of spans of queries, spans of keys that they see)
    backward  grid (row, kv head, pair of spans of keys, spans of queries that see them, head)

As in `tpu_row_attention`, tokens are in the vector lanes:

    scores' [keys, queries] = k [keys, H] q' [H, queries]      out' [H, queries] += v' probs'

The scores of the next keys are made before the softmax of these, so that the matrix units work
behind the vector units. The backward pass makes all three gradients of a block's scores at once. It
keeps those of a span of keys in vector memory until all of their queries came; those of queries are
added up in float32 in the chip's memory: what is there already arrives behind the arithmetic of
the step that adds to it, and the sum leaves behind that of the steps after it. Online softmax as in
https://arxiv.org/abs/2307.08691, in powers of two.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lmwright.core.compute import ATTENTION, LANES
from lmwright.kernels.tpu_row_attention import dot
from lmwright.kernels.tpu_spans import Ref, Specs, Step, Tables, Walk, sizes_of, span_of_queries
from lmwright.nn.attention import MASKED, Scoring
from lmwright.nn.intervals import (
    Interval,
    Reach,
    causal,
    causal_reach,
    in_place,
    zero_unseen,
)

AHEAD = 256  # keys whose scores are made while those before them become probabilities
LOG2_E = math.log2(math.e)
TABLES = len(Tables._fields)


def _at(number: Any, size: int, tokens: int | None = None) -> Any:
    """A slice of block `number`, or of its first `tokens` tokens."""
    return pl.ds(pl.multiple_of(number * size, tokens or size), tokens or size)


def _factor(scoring: Scoring) -> float:
    """Factor on the keys that makes their products with queries what `_scores` takes."""
    cap = scoring.soft_cap
    return scoring.scale * LOG2_E if cap is None else scoring.scale / cap


def _scores(
    scoring: Scoring, products: Array, first: Any, sees: tuple[Array, Array] | None
) -> tuple[Array, Array | None]:
    """Scores [keys, queries] in powers of two, from products with scaled keys of which the first is
    number `first`, and the derivative of the soft cap (None without one); `sees` is (start, end)
    [1, queries], None where they see all."""
    slope = None
    if scoring.soft_cap is not None:
        tanh = jnp.tanh(products)
        products, slope = tanh * (scoring.soft_cap * LOG2_E), 1 - tanh**2
    if sees is None:
        return products, slope
    start, end = (side - first for side in sees)
    key = lax.broadcasted_iota(jnp.int32, products.shape, 0)
    return jnp.where((key >= start) & (key < end), products, MASKED), slope


class _Keys(NamedTuple):
    """A block of keys of a span."""

    span: Any
    """Tokens of the row before the span."""
    start: Any
    """Units of the span before the block."""
    unit: int

    def place(self, number: int) -> Any:
        """Position in the row of token `number` of the block."""
        return self.span + self.start * self.unit + number

    def part(self, number: int, size: int) -> Any:
        """A slice of the span: a piece of the block, of `size` tokens."""
        if self.unit % size == 0:
            return _at(self.start * (self.unit // size) + number, size)
        return pl.ds(pl.multiple_of(self.start * self.unit + number * size, self.unit), size)


class _Program(NamedTuple):
    """Constants of both kernels."""

    scoring: Scoring
    walk: Walk
    reach: Reach

    def visit(self, tables: Tables, row: Any, step: Step, attend: Callable[..., None]) -> None:
        """`attend(i, keys, masked)` for the blocks of queries of a span, by number, and of keys of
        another, of which they see some."""
        sizes = self.walk.sizes
        count_q, count_k = sizes.span_q // sizes.block_q, sizes.span_k // sizes.block_k

        def block(n: Array, _: None) -> None:
            i, j = lax.rem(n, count_q), lax.div(n, count_q)
            queries, keys = step.queries * count_q + i, step.keys * count_k + j
            some, every = tables.seen(sizes, row, queries, keys, sizes.block_k)
            at = lambda: _Keys(step.keys * sizes.span_k, j, sizes.block_k)  # noqa: E731
            pl.when(every)(lambda: attend(i, at(), False))
            pl.when(some & jnp.logical_not(every))(lambda: attend(i, at(), True))

        def band(i: Array, _: None) -> None:
            queries, span = step.queries * count_q + i, step.keys * sizes.span_k
            before = -(-self.reach.before // LANES) * LANES
            first = jnp.maximum(queries * sizes.block_q - before - span, 0)
            first = lax.div(jnp.minimum(first, sizes.span_k - sizes.block_k), LANES)
            keys = step.keys * (sizes.span_k // LANES) + first
            some, _ = tables.seen(sizes, row, queries, keys, LANES)
            pl.when(some)(lambda: attend(i, _Keys(span, first, LANES), True))

        if sizes.band:
            lax.fori_loop(0, count_q, band, None)
        else:
            lax.fori_loop(0, count_q * count_k, block, None)


def _forward_kernel(program: _Program, *refs: Ref) -> None:
    tables = Tables(*refs[:TABLES])
    start, end, q, k, v, out, log_sums, top, total, sums = refs[TABLES:]
    scoring, walk, _ = program
    row, _, pair, number = (pl.program_id(axis) for axis in range(4))
    step = walk.step(tables, row, pair, number)
    size = walk.sizes.block_k
    ahead = next(n for n in range(min(AHEAD, size), 0, -LANES) if size % n == 0)

    @pl.when(step.first)
    def _() -> None:
        top[...] = jnp.full(top.shape, MASKED, top.dtype)
        total[...] = jnp.zeros(total.shape, total.dtype)
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    def attend(i: Array, keys: _Keys, masked: bool) -> None:
        at = _at(i, walk.sizes.block_q)
        queries, sees = q[:, at], (start[:, at], end[:, at]) if masked else None
        parts = [keys.part(n, ahead) for n in range(size // ahead)]

        def scores(n: int) -> Array:
            first = keys.place(n * ahead)
            return _scores(scoring, dot(k[parts[n], :], queries), first, sees)[0]

        old_top, so_far, result = top[:, at], total[:, at], sums[:, at]
        following = scores(0)
        for n, part in enumerate(parts):
            found = following
            if n + 1 < len(parts):
                following = scores(n + 1)
            new_top = jnp.maximum(old_top, jnp.max(found, axis=0, keepdims=True))
            probs, keep = jnp.exp2(found - new_top), jnp.exp2(old_top - new_top)
            so_far = so_far * keep + jnp.sum(probs, axis=0, keepdims=True)
            result = result * keep + dot(v[:, part], probs.astype(v.dtype))
            old_top = new_top
        top[:, at], total[:, at], sums[:, at] = old_top, so_far, result

    pl.when(step.active)(lambda: program.visit(tables, row, step, attend))

    @pl.when(step.active & step.last)
    def _() -> None:
        out[...] = (sums[...] / total[...]).astype(out.dtype)
        log_sums[...] = top[...] + jnp.log2(total[...])


class _Sums(NamedTuple):
    """Gradients of queries on their way to the chip's memory and back."""

    memory: Ref
    """Sums float32 [B, N, H, T], in the chip's memory."""
    before: Ref
    """Sum that a span already has there."""
    slots: Ref
    """Two buffers of a span: of this step, and of the one before it, whose copy may still be under
    way."""
    state: Ref
    """The slot of this step; a flag for each slot whose copy is under way; the span that left
    last."""
    arriving: Ref
    leaving: Ref

    def reset(self) -> None:
        """Begins a kv head: no copy is under way, and no span has left."""
        self.state[0], self.state[1], self.state[2], self.state[3] = 0, 0, 0, -1

    def finish(self, slot: Any, span: Ref) -> None:
        """Waits until a slot is free; `span` is any span in memory."""

        @pl.when(self.state[1 + slot] == 1)
        def _() -> None:
            pltpu.make_async_copy(self.slots.at[slot], span, self.leaving.at[slot]).wait()
            self.state[1 + slot] = 0

    def add(self, span: Ref, number: Any, begins: Any, compute: Callable[[Ref], None]) -> None:
        """Accumulates the result of `compute` into span `number` in memory. If `begins`, it
        overwrites the span; otherwise it is added to the old sum, which is fetched."""
        slot, arrival = self.state[0], pltpu.make_async_copy(span, self.before, self.arriving)
        self.finish(slot, span)
        pl.when(self.state[3] == number)(lambda: self.finish(1 - slot, span))
        pl.when(jnp.logical_not(begins))(arrival.start)
        here = self.slots.at[slot]
        here[...] = jnp.zeros(here.shape, here.dtype)
        compute(here)

        @pl.when(jnp.logical_not(begins))
        def _() -> None:
            arrival.wait()
            here[...] += self.before[...]

        pltpu.make_async_copy(here, span, self.leaving.at[slot]).start()
        self.state[0], self.state[1 + slot], self.state[3] = 1 - slot, 1, number


def _backward_kernel(program: _Program, *refs: Ref) -> None:
    tables = Tables(*refs[:TABLES])
    start, end, q, k, v, g, log_sums, inner, dq, dk, dv, *scratch = refs[TABLES:]
    turned_k, turned_v, dk_sum, dv_sum, *rest = scratch
    sums, (scoring, walk, _) = _Sums(dq, *rest), program
    row, kv, pair, number, member = (pl.program_id(axis) for axis in range(5))
    pairs, steps, members = (pl.num_programs(axis) for axis in range(2, 5))
    step = walk.step(tables, row, pair, number)
    head = kv * members + member
    span = span_of_queries(walk.sizes, dq, row, head, step.queries)
    at_span = row * walk.sizes.spans_q + step.queries

    @pl.when(step.first & (member == 0))
    def _() -> None:
        turned_k[...] = (k[...].astype(jnp.float32) * _factor(scoring)).T.astype(k.dtype)
        turned_v[...] = v[...].astype(jnp.float32).T.astype(v.dtype)
        dk_sum[...] = jnp.zeros(dk_sum.shape, dk_sum.dtype)
        dv_sum[...] = jnp.zeros(dv_sum.shape, dv_sum.dtype)

    pl.when((pair == 0) & (number == 0) & (member == 0))(sums.reset)

    def compute(dq_sum: Ref) -> None:
        def attend(i: Array, keys: _Keys, masked: bool) -> None:
            at, at_keys = _at(i, walk.sizes.block_q), keys.part(0, walk.sizes.block_k)
            first = keys.place(0)
            sees = (start[:, at], end[:, at]) if masked else None
            products = dot(turned_k[at_keys, :], q[:, at])
            scores, slope = _scores(scoring, products, first, sees)
            probs = jnp.exp2(scores - log_sums[:, at])
            dv_sum[:, at_keys] += dot(g[:, at], probs.astype(g.dtype), over=(1, 1))
            dscores = probs * (dot(turned_v[at_keys, :], g[:, at]) - inner[:, at])
            dscores = (dscores if slope is None else dscores * slope).astype(q.dtype)
            dk_sum[:, at_keys] += dot(q[:, at], dscores, over=(1, 1))
            dq_sum[:, at] += dot(k[:, at_keys], dscores)

        program.visit(tables, row, step, attend)

    begins = tables.begins[at_span] == step.keys
    which = head * walk.sizes.spans_q + step.queries
    pl.when(step.active)(lambda: sums.add(span, which, begins, compute))

    @pl.when((pair == pairs - 1) & (number == steps - 1) & (member == members - 1))
    def _() -> None:
        sums.finish(0, span)
        sums.finish(1, span)

    @pl.when(step.active & step.last & (member == members - 1))
    def _() -> None:
        dk[...] = (dk_sum[...] * scoring.scale).astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)


class Call(NamedTuple):
    """Arguments of both kernels."""

    scoring: Scoring
    reach: Reach
    interpret: Any

    def __call__(
        self,
        kernel: Callable[..., None],
        name: str,
        walk: Walk,
        heads: tuple[int, ...],
        sees: tuple[Array, Array],
        arrays: list[tuple[Array, pl.BlockSpec]],
        out: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
        scratch: list[Any],
    ) -> list[Array]:
        """`kernel(program, *tables, start, end, *arrays, *out, *scratch)`; `heads` are the kernel's
        (kv heads, heads of each) or (heads,)."""
        start, end = sees
        sizes, steps = walk.sizes, walk.most_steps(self.reach)
        said = {"block_q": sizes.block_q, "block_kv": sizes.block_k}  # for `kernel_cost`
        said |= {"span_q": sizes.span_q, "span_kv": sizes.span_k, **self.reach.metadata}
        said |= {"band": 1} if sizes.band else {}
        said |= {"pieces": p} if (p := arrays[0][0].shape[0] // start.shape[0]) > 1 else {}
        grid = (start.shape[0], heads[0], walk.pairs, steps, *heads[1:])
        by_query = Specs(walk, 1 if len(heads) == 1 else heads[1]).intervals()
        order = ("parallel", "parallel", *["arbitrary"] * (len(grid) - 2))
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=TABLES,
            grid=grid,
            in_specs=[by_query, by_query, *(spec for _, spec in arrays)],
            out_specs=[spec for _, spec in out],
            scratch_shapes=scratch,
        )
        with jax.named_scope(name):
            return pl.pallas_call(
                partial(kernel, _Program(self.scoring, walk, self.reach)),
                name=name,
                grid_spec=spec,
                out_shape=[shape for shape, _ in out],
                compiler_params=pltpu.CompilerParams(dimension_semantics=order),
                interpret=self.interpret,
                metadata={"xprof_metadata": json.dumps(said)},
            )(*walk.tables(start, end), start[:, None], end[:, None], *(a for a, _ in arrays))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, q: Array, k: Array, v: Array, start: Array, end: Array) -> Array:
    """Attention of q [B, N, H, T] to k, v [B, K, H, T], or their pieces, in start, end [B, T]."""
    return forward(call, q, k, v, start, end)[0]


def forward(call: Call, q: Array, k: Array, v: Array, start: Array, end: Array):
    """The forward pass of `_attend`: the result, and what the backward pass reads."""
    (b, n, h, t), (rows, tokens) = q.shape, start.shape
    walk = Walk(sizes_of(tokens, h, q.dtype.itemsize, call.reach), by_keys=False)
    specs, size = Specs(walk, n // k.shape[1], b // rows), walk.sizes.span_q
    queries, keys = specs.of("queries", h), specs.of("keys", h)
    scaled = (k.astype(jnp.float32) * _factor(call.scoring)).astype(k.dtype).swapaxes(2, 3)
    arrays = [(q, queries), (scaled, specs.turned_keys(h)), (v, keys)]
    sums = jax.ShapeDtypeStruct((b, n, 1, t), jnp.float32)
    made = [(_like(q), queries), (sums, specs.of("queries", 1))]
    scratch = [pltpu.VMEM((rows, size), jnp.float32) for rows in (1, 1, h)]
    out, log_sums = call(
        _forward_kernel, "long_attention_fwd", walk, (n,), (start, end), arrays, made, scratch
    )
    out, log_sums = (checkpoint_name(a, ATTENTION) for a in (out, log_sums))
    return out, (q, k, v, start, end, out, log_sums)


def backward(call: Call, residuals: tuple[Array, ...], g: Array):
    """The backward pass of `_attend`: gradients of q, k and v, and None for what is seen."""
    q, k, v, start, end, out, log_sums = residuals
    inner = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=2, keepdims=True)
    (b, n, h, _), kv_heads, (rows, tokens) = q.shape, k.shape[1], start.shape
    walk = Walk(sizes_of(tokens, h, q.dtype.itemsize, call.reach), by_keys=True)
    sizes, specs = walk.sizes, Specs(walk, n // kv_heads, b // rows)
    queries, keys, one = specs.of("queries", h), specs.of("keys", h), specs.of("queries", 1)
    arrays = [(q, queries), (k, keys), (v, keys), (g.astype(q.dtype), queries)]
    arrays += [(log_sums, one), (inner, one)]
    in_float32 = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    made = [(in_float32, pl.BlockSpec(memory_space=pltpu.HBM)), (_like(k), keys), (_like(v), keys)]
    turned, by_key = (pltpu.VMEM((sizes.span_k, h), a.dtype) for a in (k, v)), (h, sizes.span_k)
    scratch = [*turned, pltpu.VMEM(by_key, jnp.float32), pltpu.VMEM(by_key, jnp.float32)]
    scratch += [pltpu.VMEM((*two, h, sizes.span_q), jnp.float32) for two in ((), (2,))]
    scratch += [pltpu.SMEM((4,), jnp.int32)]
    scratch += [pltpu.SemaphoreType.DMA(()), pltpu.SemaphoreType.DMA((2,))]
    heads = (kv_heads, n // kv_heads)
    dq, dk, dv = call(
        _backward_kernel, "long_attention_bwd", walk, heads, (start, end), arrays, made, scratch
    )
    return (dq * call.scoring.scale).astype(q.dtype), dk, dv, None, None


_attend.defvjp(forward, backward)


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def causal_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring, *, interpret: Any = False
) -> Array:
    """Causal attention, as `nn.attention.causal_attention`, of one device's own rows, for which
    `tpu_spans.fits` holds, and whose q, k and v may be in pieces; a segment stands together."""
    seen, reach = causal(segment_ids, scoring.window), causal_reach(scoring.window)
    return attention(q, k, v, seen, scoring, reach, interpret=interpret)


def attention(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach,
    *, interpret: Any = False,
) -> Array:  # fmt: skip
    """Attention over intervals that lie within `reach`, as `nn.intervals.attention`, of one
    device's own rows, for which `tpu_spans.fits` holds."""
    start, end = seen if reach.exact else in_place(seen)
    q, k, v = (a.transpose(0, 2, 3, 1) for a in (q, k, v))  # [B, N, H, T]
    out = _attend(Call(scoring, reach, interpret), q, k, v, start, end).transpose(0, 3, 1, 2)
    return out if reach.exact else zero_unseen(out, seen)
