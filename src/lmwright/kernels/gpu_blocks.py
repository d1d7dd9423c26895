"""Attention to intervals of keys on GPUs from Ampere on, by kernels in Triton through Pallas.

    out        a block of queries meets, one after the other, the blocks of keys that it sees
    dq         the same walk, with scores computed again (https://arxiv.org/abs/2205.14135)
    dk, dv     a block of keys meets the blocks of queries that see it, in each head of its group

A walk leaves out what no query sees, so that packed documents cost what they hold (`gpu_walks`).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from lmwright.core.compute import ATTENTION
from lmwright.core.gpu_ragged import dot
from lmwright.core.sharding import device_kind
from lmwright.kernels.gpu_walks import Sums, Walk, walk_of_keys, walk_of_queries
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach, in_place, zero_unseen

LOG2E = 1.4426950408889634  # GPUs compute powers of two
HIDDEN = -(2.0**100)  # a power of two, or its product with `Call.unit` would be rounded

# queries and keys of a block, and warps, by the most numbers of a head, for `Calls`: no two warps
# compute the same, and all but one fit 99 KiB of shared memory (aot/test_gpu_blocks.py)
SIZES = {
    64: ((128, 64, 4), (128, 32, 4), (64, 64, 4)),
    128: ((128, 64, 8), (128, 32, 8), (64, 64, 8)),
    256: ((64, 32, 4), (32, 32, 4), (32, 32, 4)),
}
# the one that does not, since JAX 0.11: dk and dv on cards other than these, such as an L4
LARGE = re.compile(r"\b(A30|A[18]00|G?H[128]00|H20|G?B[123]00)\b|^$")  # "": without a mesh
SMALL_DKV = (32, 64, 8)

Ref = Any


@dataclass(frozen=True)
class Call:
    """Static arguments of a kernel."""

    scoring: Scoring
    head_dim: int
    block_q: int
    block_k: int
    num_warps: int
    interpret: bool = False

    @property
    def width(self) -> int:
        """Numbers of a head in a kernel: a power of two, filled up with zeros."""
        return max(16, pl.next_power_of_2(self.head_dim))

    @property
    def inside(self) -> Array:
        """bool [1, width]: True for the numbers that a head has."""
        return jnp.arange(self.width)[None] < self.head_dim

    def load(self, ref: Ref) -> Array:
        """[tokens, width] of a block, zeros behind the head."""
        if self.width == self.head_dim:
            return ref[...]
        return triton.load(ref, mask=self.inside, other=0.0)

    def store(self, ref: Ref, block: Array) -> None:
        """Writes [tokens, width] without what is behind the head."""
        mask = None if self.width == self.head_dim else self.inside
        triton.store(ref, block.astype(ref.dtype), mask=mask)

    @property
    def unit(self) -> float:
        """Scores are computed divided by it (it is positive), to the base of 2."""
        return LOG2E * (self.scoring.soft_cap or self.scoring.scale)

    def scores(self, q: Array, k: Array) -> tuple[Array, Array | None]:
        """float32 [queries, keys], and the derivative of the soft cap (None without one)."""
        scores, cap = dot(q, k.T), self.scoring.soft_cap
        if cap is None:
            return scores, None
        scores = jnp.tanh(scores * (self.scoring.scale / cap))
        return scores, 1 - scores**2

    def powers(self, scores: Array, log_sums: Array) -> Array:
        """2**(scores * unit - log_sums): a multiplication with addition and a power, where the
        compiler would guard results below 2**-126 by three operations more."""
        if self.interpret:
            return jnp.exp2(scores * self.unit - log_sums)
        unit = np.float32(self.unit).view(np.uint32)
        return triton.elementwise_inline_asm(
            f"{{.reg .f32 x; fma.rn.ftz.f32 x, $1, 0f{unit:08x}, $2; ex2.approx.ftz.f32 $0, x;}}",
            args=[scores, jnp.broadcast_to(-log_sums, scores.shape)],
            constraints="=f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(scores.shape, jnp.float32)],
        )[0]

    def run(self, kernel: Callable[..., None], **options: Any) -> Callable[..., Any]:
        """The kernel as a function of arrays."""
        params = triton.CompilerParams(num_warps=self.num_warps, num_stages=2)
        return pl.pallas_call(
            partial(kernel, self), compiler_params=params, interpret=self.interpret, **options
        )


class Calls(NamedTuple):
    """The calls of the three kernels."""

    out: Call
    dq: Call
    dkv: Call

    @classmethod
    def of(cls, scoring: Scoring, length: int, head_dim: int, interpret: bool = False) -> "Calls":
        """Calls with the usual sizes of blocks."""
        out, dq, dkv = next(sizes for most, sizes in SIZES.items() if head_dim <= most)
        if 64 < head_dim <= 128 and not LARGE.search(device_kind()):
            dkv = SMALL_DKV
        if length % 128:  # a multiple of 64
            out, dq = ((min(q, 64), k, warps * min(q, 64) // q) for q, k, warps in (out, dq))
        return cls(*(Call(scoring, head_dim, *size, interpret) for size in (out, dq, dkv)))


def attention(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach, *,
    interpret: bool = False,
) -> Array:  # fmt: skip
    """`nn.intervals.attention` of one device's own rows, for which `gpu_attention.fits` holds."""
    return attention_by(Calls.of(scoring, q.shape[1], q.shape[3], interpret), q, k, v, seen, reach)


def attention_by(calls: Calls, q: Array, k: Array, v: Array, seen: Interval, reach: Reach) -> Array:
    """`attention` with the sizes of blocks of `calls`."""
    if reach.exact:
        return _attention(calls, q, k, v, seen)
    return zero_unseen(_attention(calls, q, k, v, in_place(seen)), seen)


def _masked(call: Call, scores: Array, start: Array, end: Array, block: Any) -> Array:
    """Scores of a block of keys, where the queries see them."""
    key = block * call.block_k + jnp.arange(call.block_k, dtype=jnp.int32)[None]
    return jnp.where((key >= start[:, None]) & (key < end[:, None]), scores, HIDDEN)


def _out_kernel(call: Call, *refs: Ref) -> None:
    q_ref, k_ref, v_ref, start_ref, end_ref, *walk, out_ref, log_ref = refs
    q, start, end = call.load(q_ref), start_ref[...], end_ref[...]

    def step(masked: bool, block: Any, sums: Sums) -> Sums:
        top, total, out = sums
        at = pl.ds(block * call.block_k, call.block_k)
        scores, _ = call.scores(q, call.load(k_ref.at[at]))
        if masked:
            scores = _masked(call, scores, start, end, block)
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        log = new * call.unit
        probs, old = call.powers(scores, log[:, None]), call.powers(top, log)
        v = call.load(v_ref.at[at])
        out = out * old[:, None] + dot(probs.astype(v.dtype), v)
        return new, total * old + jnp.sum(probs, axis=1), out

    none = jnp.full(call.block_q, HIDDEN, jnp.float32), jnp.zeros(call.block_q, jnp.float32)
    sums = (*none, jnp.zeros((call.block_q, call.width), jnp.float32))
    top, total, out = Walk(*walk).at(pl.program_id(0)).run(step, sums)
    call.store(out_ref, out / total[:, None])
    log_ref[...] = top * call.unit + jnp.log2(total)


def _gradient_of_scores(
    call: Call, q: Array, k: Array, v: Array, g: Array, log_sum: Array, inner: Array,
    mask: Callable[[Array], Array],
) -> tuple[Array, Array]:  # fmt: skip
    """float32 [queries, keys]: probabilities, and the gradient of the products of q and k, divided
    by the scale."""
    scores, slope = call.scores(q, k)
    probs = call.powers(mask(scores), log_sum[:, None])
    change = probs * (dot(g, v.T) - inner[:, None])
    return probs, change if slope is None else change * slope


def _dq_kernel(call: Call, *refs: Ref) -> None:
    q_ref, k_ref, v_ref, g_ref, log_ref, inner_ref, start_ref, end_ref, *walk, dq_ref = refs
    q, g = call.load(q_ref), call.load(g_ref)
    log_sum, inner, start, end = log_ref[...], inner_ref[...], start_ref[...], end_ref[...]

    def step(masked: bool, block: Any, sums: Sums) -> Sums:
        at = pl.ds(block * call.block_k, call.block_k)
        k, v = call.load(k_ref.at[at]), call.load(v_ref.at[at])
        mask = lambda s: _masked(call, s, start, end, block) if masked else s  # noqa: E731
        _, change = _gradient_of_scores(call, q, k, v, g, log_sum, inner, mask)
        return (sums[0] + dot(change.astype(k.dtype), k),)

    zeros = jnp.zeros((call.block_q, call.width), jnp.float32)
    (dq,) = Walk(*walk).at(pl.program_id(0)).run(step, (zeros,))
    call.store(dq_ref, dq * call.scoring.scale)


def _dkv_kernel(call: Call, *refs: Ref) -> None:
    """Refs of queries hold the heads of a group, one after the other."""
    q_ref, k_ref, v_ref, g_ref, log_ref, inner_ref, start_ref, end_ref = refs[:8]
    *walk, dk_ref, dv_ref = refs[8:]
    k, v, keys = call.load(k_ref), call.load(v_ref), pl.program_id(0)
    steps = Walk(*walk).at(keys)

    def head(member: Any, sums: Sums) -> Sums:
        def step(masked: bool, block: Any, sums: Sums) -> Sums:
            at = pl.ds(block * call.block_q, call.block_q)
            q, g = call.load(q_ref.at[at, member]), call.load(g_ref.at[at, member])
            start, end = start_ref[at], end_ref[at]
            mask = lambda s: _masked(call, s, start, end, keys) if masked else s  # noqa: E731
            probs, change = _gradient_of_scores(
                call, q, k, v, g, log_ref[member, at], inner_ref[member, at], mask
            )
            dk, dv = sums
            dv = dv + dot(probs.astype(g.dtype).T, g)
            return dk + dot(change.astype(q.dtype).T, q), dv

        return steps.run(step, sums)

    zeros = jnp.zeros((call.block_k, call.width), jnp.float32)
    dk, dv = lax.fori_loop(0, q_ref.shape[1], head, (zeros, zeros))
    call.store(dk_ref, dk * call.scoring.scale)
    call.store(dv_ref, dv)


class Specs(NamedTuple):
    """Block specs of a grid (block, head, row)."""

    call: Call
    length: int
    group: int
    """Query heads of a kv head."""

    @property
    def queries(self) -> pl.BlockSpec:
        """A block of a head of q [B, T, N, H]."""
        block = (None, self.call.block_q, None, self.call.width)
        return pl.BlockSpec(block, lambda i, n, b: (b, i, n, 0))

    @property
    def keys(self) -> pl.BlockSpec:
        """The row of the kv head of a query head, of k [B, T, K, H]."""
        block = (None, self.length, None, self.call.width)
        return pl.BlockSpec(block, lambda i, n, b: (b, 0, n // self.group, 0))

    @property
    def some_keys(self) -> pl.BlockSpec:
        """A block of a head of k [B, T, K, H]."""
        block = (None, self.call.block_k, None, self.call.width)
        return pl.BlockSpec(block, lambda i, n, b: (b, i, n, 0))

    @property
    def heads(self) -> pl.BlockSpec:
        """The row of a group of heads of q [B, T, N, H]."""
        block = (None, self.length, self.group, self.call.width)
        return pl.BlockSpec(block, lambda i, n, b: (b, 0, n, 0))

    def numbers(self, whole: bool) -> pl.BlockSpec:
        """Numbers of queries [B, N, T]: of a block of a head, or of a group of whole rows."""
        if whole:
            return pl.BlockSpec((None, self.group, self.length), lambda i, n, b: (b, n, 0))
        return pl.BlockSpec((None, None, self.call.block_q), lambda i, n, b: (b, n, i))

    def sides(self, whole: bool) -> list[pl.BlockSpec]:
        """Starts and ends of intervals [B, T], and the four sides of walks [B, blocks]."""
        of_row = lambda size: pl.BlockSpec((None, size), lambda i, n, b: (b, 0))  # noqa: E731
        some = pl.BlockSpec((None, self.call.block_q), lambda i, n, b: (b, i))
        blocks = self.length // (self.call.block_k if whole else self.call.block_q)
        return [of_row(self.length) if whole else some] * 2 + [of_row(blocks)] * 4


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(calls: Calls, q: Array, k: Array, v: Array, seen: Interval) -> Array:
    """Attention of q [B, T, N, H] to k, v [B, T, K, H]; each query sees a key."""
    return forward(calls, q, k, v, seen)[0]


def forward(calls: Calls, q: Array, k: Array, v: Array, seen: Interval):
    """Results, and what `backward` needs: arguments, results, and float32 [B, N, T] logs of softmax
    sums to the base of 2."""
    out, log_sums = (
        checkpoint_name(a, ATTENTION) for a in _attention_out(calls.out, q, k, v, seen)
    )
    return out, (q, k, v, seen, out, log_sums)


def backward(calls: Calls, residuals: tuple[Any, ...], g: Array):
    """Gradients of queries, keys and values, and None for the intervals."""
    return *_attention_gradients(calls, residuals, g), None


_attention.defvjp(forward, backward)


# traced and lowered once for all layers
@partial(jax.jit, static_argnums=0)
def _attention_out(call: Call, q: Array, k: Array, v: Array, seen: Interval) -> tuple[Array, Array]:
    b, t, n, _ = q.shape
    specs = Specs(call, t, n // k.shape[2])
    return call.run(
        _out_kernel,
        grid=(t // call.block_q, n, b),
        in_specs=[specs.queries, specs.keys, specs.keys, *specs.sides(whole=False)],
        out_specs=[specs.queries, specs.numbers(whole=False)],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((b, n, t), jnp.float32),
        ],
    )(q, k, v, *seen, *walk_of_queries(seen, call.block_q, call.block_k))  # fmt: skip


@partial(jax.jit, static_argnums=0)
def _attention_gradients(
    calls: Calls, residuals: tuple[Any, ...], g: Array
) -> tuple[Array, Array, Array]:
    q, k, v, seen, out, log_sums = residuals
    b, t, n, _ = q.shape
    g = g.astype(q.dtype)
    inner = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), g.astype(jnp.float32))
    arrays, group = (q, k, v, g, log_sums, inner, *seen), n // k.shape[2]
    call, specs = calls.dq, Specs(calls.dq, t, group)
    numbers = [specs.numbers(whole=False)] * 2
    dq = call.run(
        _dq_kernel,
        grid=(t // call.block_q, n, b),
        in_specs=[
            specs.queries, specs.keys, specs.keys, specs.queries, *numbers,
            *specs.sides(whole=False),
        ],
        out_specs=specs.queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(*arrays, *walk_of_queries(seen, call.block_q, call.block_k))  # fmt: skip
    call, specs = calls.dkv, Specs(calls.dkv, t, group)
    numbers = [specs.numbers(whole=True)] * 2
    dk, dv = call.run(
        _dkv_kernel,
        grid=(t // call.block_k, k.shape[2], b),
        in_specs=[
            specs.heads, specs.some_keys, specs.some_keys, specs.heads, *numbers,
            *specs.sides(whole=True),
        ],
        out_specs=[specs.some_keys] * 2,
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (k, v)],
    )(*arrays, *walk_of_keys(seen, call.block_q, call.block_k))  # fmt: skip
    return dq, dk, dv
