"""Causal attention for TPUs whose rows fit the vector memory: one Pallas kernel each way.

    grid (row, kv head, query head of its group); q, k, v, out [H, T] of one head, whole

Everything has the tokens in the vector lanes, so that heads of 64 or 96 fill them, and sums
and maxima of the softmax run down the sublanes and are kept as rows [1, T]:

    scores' [keys, queries] = k [keys, H] q' [H, queries]      out' [H, queries] += v' probs'

Blocks above the diagonal or before a window are skipped. The backward pass keeps gradients of
q, k and v in float32 in vector memory until a head, or its group, is done: no partial sum
leaves the chip. Online softmax as in https://arxiv.org/abs/2307.08691.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lmwright.core.compute import ATTENTION, LANES
from lmwright.nn.attention import MASKED, Scoring

BLOCK = 512  # tokens whose scores with as many others exist at once
VECTOR_MEMORY = 2**24  # bytes that a kernel may use on every generation

Ref = Any  # of an array in vector memory
Sums = tuple[Array, Array, Array]  # of the online softmax: the largest score, total, output


def fits(seq_len: int, head_dim: int, itemsize: int) -> bool:
    """True if the backward pass has room for a whole head, of dimensions that fill tiles."""
    whole = seq_len % LANES == 0 and head_dim % 16 == 0
    return whole and _vector_memory(seq_len, head_dim, itemsize) <= VECTOR_MEMORY


def _vector_memory(seq_len: int, head_dim: int, itemsize: int) -> int:
    """Bytes of vector memory that the backward kernel needs: double-buffered inputs (4) and outputs
    (3); transposed keys and values; three accumulators; ids; scores of a block."""
    turned = 2 * -(-head_dim // LANES) * LANES + head_dim
    head = seq_len * (head_dim * (14 * itemsize + 3 * 4) + turned * itemsize)
    return head + 2 * 4 * seq_len * LANES + 2 * 4 * block_of(seq_len) ** 2


def block_of(seq_len: int) -> int:
    """Tokens of a block: the most that divide the row."""
    return next(size for size in range(BLOCK, 0, -LANES) if seq_len % size == 0)


class Row(NamedTuple):
    """Blocks of a row, which of them are visited, and the transformation of their scores."""

    size: int
    count: int
    scoring: Scoring
    q_ids: Ref
    """Segment ids of queries, [1, T]."""
    k_ids: Ref
    """Segment ids of keys, [T, LANES], the same in every lane."""

    def at(self, block: Array) -> Any:
        return pl.ds(pl.multiple_of(block * self.size, self.size), self.size)

    def over_keys(self, queries: Array, some: Callable[..., Sums], none: Sums) -> Sums:
        """Sums after the blocks of keys that a block of queries sees."""
        first, window = 0, self.scoring.window
        if window is not None:
            first = jnp.maximum(0, queries * self.size - window + 1)
            first = lax.div(
                first, self.size
            )  # `//` asks which TPU this is, which a plan cannot say
        before = lax.fori_loop(first, queries, some, none)
        return some(queries, before, diagonal=True)

    def over_queries(self, keys: Array, some: Callable[..., None]) -> None:
        """Runs `some` on the blocks of queries that see a block of keys."""
        some(keys, None, diagonal=True)
        end = self.count
        if self.scoring.window is not None:
            last = (keys + 1) * self.size + self.scoring.window - 2  # who sees the last key
            end = jnp.minimum(end, lax.div(last, self.size) + 1)
        lax.fori_loop(keys + 1, end, some, None)

    def scores(
        self, k: Array, q: Array, keys: Array, queries: Array, diagonal: bool
    ) -> tuple[Array, Array | None]:
        """Masked float32 [keys, queries] of scaled k [keys, H] and q [H, queries], and the
        derivative of the soft cap (None without one). Below the diagonal all are in order."""
        scores, slope = self.scoring.capped_with_slope(dot(k, q))
        ids = jnp.tile(self.k_ids[self.at(keys), :], (1, self.size // LANES))
        seen = ids == self.q_ids[:, self.at(queries)]
        if diagonal or self.scoring.window is not None:
            key, query = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
            behind = query - key + (queries - keys) * self.size
            seen &= behind >= 0
            if self.scoring.window is not None:
                seen &= behind < self.scoring.window
        return jnp.where(seen, scores, MASKED), slope


def dot(a: Array, b: Array, over: tuple[int, int] = (1, 0)) -> Array:
    """Product of two matrices in float32, over these axes."""
    contracted = ((over[0],), (over[1],))
    return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)


def _forward_kernel(call: "Call", size: int, *refs: Ref) -> None:
    *marks, q, k, v, out, log_sums, keys = refs
    row, scoring = call.row(size, q.shape[1] // size, call.scoring, *marks), call.scoring

    @pl.when(pl.program_id(2) == 0)
    def _():
        keys[...] = (k[...].astype(jnp.float32) * scoring.scale).T.astype(keys.dtype)

    def queries(i: Array, _: None) -> None:
        block = q[:, row.at(i)]

        def some(j: Array, sums: Sums, diagonal: bool = False) -> Sums:
            top, total, out = sums
            scores, _ = row.scores(keys[row.at(j), :], block, j, i, diagonal)
            new_top = jnp.maximum(top, jnp.max(scores, axis=0, keepdims=True))
            probs, keep = jnp.exp(scores - new_top), jnp.exp(top - new_top)
            total = total * keep + jnp.sum(probs, axis=0, keepdims=True)
            return new_top, total, out * keep + dot(v[:, row.at(j)], probs.astype(v.dtype))

        zero_row = jnp.zeros((1, size), jnp.float32)
        none = (zero_row + MASKED, zero_row, jnp.zeros(block.shape, jnp.float32))
        top, total, sums = row.over_keys(i, some, none)
        out[:, row.at(i)] = (sums / total).astype(out.dtype)
        log_sums[:, row.at(i)] = top + jnp.log(total)

    lax.fori_loop(0, row.count, queries, None)


def _backward_kernel(call: "Call", size: int, *refs: Ref) -> None:
    *marks, q, k, v, g, log_sums, inner, dq, dk, dv = refs[:-6]
    turned_k, turned_v, scaled_k, dq_sum, dk_sum, dv_sum = refs[-6:]
    row, scoring = call.row(size, q.shape[1] // size, call.scoring, *marks), call.scoring

    @pl.when(pl.program_id(2) == 0)
    def _():
        scaled = k[...].astype(jnp.float32) * scoring.scale
        scaled_k[...] = scaled.astype(k.dtype)
        turned_k[...] = scaled.T.astype(k.dtype)
        turned_v[...] = v[...].T
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    dq_sum[...] = jnp.zeros_like(dq_sum)

    def keys(j: Array, _: None) -> None:
        at_keys = row.at(j)

        def some(i: Array, _: None, diagonal: bool = False) -> None:
            at = row.at(i)
            scores, slope = row.scores(turned_k[at_keys, :], q[:, at], j, i, diagonal)
            probs = jnp.exp(scores - log_sums[:, at])
            dv_sum[:, at_keys] += dot(g[:, at], probs.astype(g.dtype), over=(1, 1))
            dscores = probs * (dot(turned_v[at_keys, :], g[:, at]) - inner[:, at])
            dscores = (dscores if slope is None else dscores * slope).astype(q.dtype)
            dk_sum[:, at_keys] += dot(q[:, at], dscores, over=(1, 1))
            dq_sum[:, at] += dot(scaled_k[:, at_keys], dscores)

        row.over_queries(j, some)

    lax.fori_loop(0, row.count, keys, None)
    dq[...] = dq_sum[...].astype(dq.dtype)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        dk[...] = (dk_sum[...] * scoring.scale).astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)


@dataclass(frozen=True)
class Call:
    """Arguments of both kernels, for causal rows; `tpu_row_intervals` has those of intervals."""

    scoring: Scoring
    interpret: bool
    row: ClassVar[Callable[..., Any]] = Row

    @property
    def metadata(self) -> dict[str, object]:
        """Entries of the kernels' metadata about the mask."""
        window = self.scoring.window
        return {} if window is None else {"window": window}

    def marks(self, ids: Array) -> list[tuple[Array, pl.BlockSpec]]:
        """Operands that say what is seen, here of ids [B, T]."""
        b, t = ids.shape
        wide = jnp.broadcast_to(ids[:, :, None], (b, t, LANES))
        return [
            (ids[:, None], pl.BlockSpec((None, 1, t), lambda b, *_: (b, 0, 0))),
            (wide, pl.BlockSpec((None, t, LANES), lambda b, *_: (b, 0, 0))),
        ]

    def __call__(
        self,
        kernel: Callable[..., None],
        name: str,
        seen: tuple[Array, ...],
        arrays: tuple[Array, ...],
        out: list[jax.ShapeDtypeStruct],
        scratch: list[Any],
    ) -> list[Array]:
        """`kernel(call, size, *marks, *arrays, *out, *scratch)`; `arrays`, of which the first
        two are q and k, and `out` are [B, N, ., T] or [B, K, ., T]."""
        (b, n, _, t), kv_heads = arrays[0].shape, arrays[1].shape[1]
        group = n // kv_heads

        def whole(array: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
            by_query = lambda b, kv, g: (b, kv * group + g, 0, 0)  # noqa: E731
            by_key = lambda b, kv, g: (b, kv, 0, 0)  # noqa: E731
            block = (None, None, *array.shape[2:])
            return pl.BlockSpec(block, by_query if array.shape[1] == n else by_key)

        size, marks = block_of(t), self.marks(*seen)
        said = {"block_q": size, "block_kv": size, **self.metadata}  # for `kernel_cost`
        with jax.named_scope(name):
            return pl.pallas_call(
                partial(kernel, self, size),
                name=name,
                grid=(b, kv_heads, group),
                in_specs=[*(spec for _, spec in marks), *map(whole, arrays)],
                out_specs=[whole(a) for a in out],
                out_shape=out,
                scratch_shapes=scratch,
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "parallel", "arbitrary"),
                ),
                interpret=self.interpret,
                metadata={"xprof_metadata": json.dumps(said)},
            )(*(array for array, _ in marks), *arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call: Call, q: Array, k: Array, v: Array, seen: tuple[Array, ...]) -> Array:
    """Attention of q [B, N, H, T] to k, v [B, K, H, T]; `call.marks` takes `seen`."""
    return forward(call, q, k, v, seen)[0]


def forward(call: Call, q: Array, k: Array, v: Array, seen: tuple[Array, ...]):
    """The forward pass of `attend`: the result, and what the backward pass reads."""
    b, n, h, t = q.shape
    out = [_like(q), jax.ShapeDtypeStruct((b, n, 1, t), jnp.float32)]
    scratch = [pltpu.VMEM((t, h), k.dtype)]
    out, log_sums = call(_forward_kernel, "row_attention_fwd", seen, (q, k, v), out, scratch)
    out, log_sums = (checkpoint_name(a, ATTENTION) for a in (out, log_sums))
    return out, (q, k, v, seen, out, log_sums)


def backward(call: Call, residuals: tuple, g: Array):
    """The backward pass of `attend`: gradients of q, k and v, and None for what is seen."""
    q, k, v, seen, out, log_sums = residuals
    inner = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=2, keepdims=True)
    h, t = q.shape[2:]
    turned, sums = pltpu.VMEM((t, h), k.dtype), pltpu.VMEM((h, t), jnp.float32)
    scratch = [turned, turned, pltpu.VMEM((h, t), k.dtype), sums, sums, sums]
    arrays = (q, k, v, g.astype(q.dtype), log_sums, inner)
    out = [_like(a) for a in (q, k, v)]
    return *call(_backward_kernel, "row_attention_bwd", seen, arrays, out, scratch), None


attend.defvjp(forward, backward)


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def causal_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring, *, interpret: bool = False
) -> Array:
    """Causal attention of one device's own rows, for which `fits` holds (`nn.attention`)."""
    q, k, v = (a.transpose(0, 2, 3, 1) for a in (q, k, v))  # [B, N, H, T]
    return attend(Call(scoring, interpret), q, k, v, (segment_ids,)).transpose(0, 3, 1, 2)
