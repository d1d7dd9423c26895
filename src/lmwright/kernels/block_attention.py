"""Attention of block diffusion (https://arxiv.org/abs/2503.09573): rows with masks, beside the same
rows without.

    rows        a query sees
    masked      its block of the masked row, and all blocks before it of the clean one
    clean       its block of the clean row, and all blocks before it

Blocks begin with their segment (`nn.intervals.blocks`). A masked query has two intervals of keys in
two rows: the kernels that see one interval run for each, and the results are joined by the logs of
their softmax sums. The backward pass of each needs no more than the joint result and sum, as in
FlashAttention (https://arxiv.org/abs/2205.14135).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.sharding import by_shard
from lmwright.kernels import select
from lmwright.kernels.online_softmax import (
    along,
    finished,
    grouped,
    named,
    no_sums,
    pair_gradients,
    softmax_sums,
    ungrouped,
)
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import (
    Interval,
    Reach,
    blocks,
    blocks_reach,
    both_ways,
    in_place,
    own_block,
)


class Halves(NamedTuple):
    """Forward and backward kernels for one interval of keys."""

    forward: Callable[..., tuple[Array, Array]]
    """(scoring, reach, q, k, v, seen) to [B, T, N, H] and logs of the softmax sums [B, T, N]."""
    backward: Callable[..., tuple[Array, Array, Array]]
    """(scoring, reach, q, k, v, seen, out, log_sums, g) to gradients of q, k and v."""


def blocks_by(
    compute: Compute, size: int, masked_rows: int, *, kernel: str | None = None,
    interpret: Any = False,
) -> Callable[..., Array]:  # fmt: skip
    """`attend(q, k, v, segment_ids, scoring)` for rows [B, T] that hold so many masked copies and
    then the clean row, in blocks of `size` tokens. `kernel` and `interpret` are for tests of the
    masked rows."""
    clean_attend, kernel = select.attend(compute), kernel or compute.kernels
    own, before = Reach(size - 1, size - 1), Reach(after=0)

    def run(q: Array, k: Array, v: Array, ids: Array, scoring: Scoring) -> Array:
        each = masked_rows + 1
        apart = lambda a: a.reshape(-1, each, *a.shape[1:])  # noqa: E731
        masked = lambda a: apart(a)[:, :-1].reshape(-1, *a.shape[1:])  # noqa: E731
        clean = lambda a: apart(a)[:, -1]  # noqa: E731
        again = lambda a: jnp.repeat(clean(a), masked_rows, axis=0)  # noqa: E731
        block = own_block(ids, size)
        earlier = Interval(both_ways(ids).start, block.start)
        there = blocks(clean(ids), size)
        plain = clean_attend(*map(clean, (q, k, v)), there, scoring, blocks_reach(size))
        program = _Program(kernel, interpret, scoring, (own, before))
        attend = by_shard(
            partial(_local, program),
            "batch seq kv_heads head_dim", "batch seq kv_heads head_dim", "batch seq",
        )  # fmt: skip
        seen, earlier = jax.tree.map(masked, (block, earlier))
        joint = attend(*map(masked, (q, k, v)), seen, again(k), again(v), earlier)
        both = jnp.concatenate([joint.reshape(-1, masked_rows, *q.shape[1:]), plain[:, None]], 1)
        return both.reshape(q.shape)

    return run


@dataclass(frozen=True)
class _Program:
    """Static arguments of the joint attention."""

    kernel: str
    interpret: Any
    scoring: Scoring
    reaches: tuple[Reach, Reach]

    def halves(self, q: Array) -> Halves:
        """The platform's forward and backward functions for such queries."""
        if self.kernel == "cpu":
            return Halves(_cpu_forward, _cpu_backward)
        if self.kernel == "tpu":
            return _tpu(q, self.interpret) or Halves(_forward, _backward)
        if self.kernel == "gpu":
            return _gpu(q, self.interpret) or Halves(_forward, _backward)
        return Halves(_forward, _backward)


def _local(
    program: _Program, q: Array, k: Array, v: Array, seen: Interval, more_k: Array, more_v: Array,
    more_seen: Interval,
) -> Array:  # fmt: skip
    """One device's part."""
    return _joint(program, q, ((k, v, seen), (more_k, more_v, more_seen)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _joint(program: _Program, q: Array, parts: tuple[Any, ...]) -> Array:
    """Attention of q [B, T, N, H] to all parts (k, v, seen), under one softmax."""
    return _joint_fwd(program, q, parts)[0]


def _joint_fwd(program: _Program, q: Array, parts: tuple[Any, ...]):
    forward, results = program.halves(q).forward, []
    for reach, (k, v, (start, end)) in zip(program.reaches, parts, strict=True):
        out, sums = forward(program.scoring, reach, q, k, v, Interval(start, end))
        some = (start < end)[..., None]
        results.append((jnp.where(some[..., None], out, 0), jnp.where(some, sums, -jnp.inf)))
    log_sums = jnp.logaddexp(*(sums for _, sums in results))  # each sees its own block at least
    shares = [jnp.exp(sums - log_sums)[..., None] * out for out, sums in results]
    out = sum(shares).astype(q.dtype)  # type: ignore[union-attr]
    out, log_sums = named(out, log_sums)
    return out, (q, parts, out, log_sums)


def _joint_bwd(program: _Program, residuals: tuple[Any, ...], g: Array):
    q, parts, out, log_sums = residuals
    backward, dq, gradients = program.halves(q).backward, 0.0, []
    for reach, (k, v, seen) in zip(program.reaches, parts, strict=True):
        new_dq, dk, dv = backward(
            program.scoring, reach, q, k, v, Interval(*seen), out, log_sums, g
        )
        dq = dq + new_dq.astype(jnp.float32)
        gradients.append((dk.astype(k.dtype), dv.astype(v.dtype), None))
    return dq.astype(q.dtype), tuple(gradients)


_joint.defvjp(_joint_fwd, _joint_bwd)


def _forward(scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen: Interval):
    scaled = grouped(q * scoring.scale, k.shape[2])
    sums = softmax_sums(scoring, (scaled, seen), (k, v, 0), no_sums(scaled.shape))
    out, log_sums = finished(sums, jnp.float32)
    return ungrouped(out), ungrouped(log_sums)


def _backward(
    scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen: Interval, out: Array,
    log_sums: Array, g: Array,
):  # fmt: skip
    arrays = (grouped(a, k.shape[2]) for a in (q, g.astype(q.dtype), along(out, g), log_sums))
    dq, dk, dv = pair_gradients(scoring, (*arrays, seen), (k, v, 0))
    return ungrouped(dq), dk, dv


def _cpu_forward(scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen: Interval):
    from lmwright.kernels import cpu_attention

    rows = cpu_attention.over_rows(partial(cpu_attention.outputs, scoring, reach))
    out, log_sums = rows(q, k, v, *seen)
    b, t, n, _ = q.shape
    return out, log_sums.reshape(b, n, t).swapaxes(1, 2)


def _cpu_backward(
    scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen: Interval, out: Array,
    log_sums: Array, g: Array,
):  # fmt: skip
    from lmwright.kernels import cpu_attention

    (b, t, n, _), kv_heads = q.shape, k.shape[2]
    sums = log_sums.swapaxes(1, 2).reshape(b * kv_heads, n // kv_heads, t)
    rows = cpu_attention.over_rows(partial(cpu_attention.gradients, scoring, reach))
    return rows(q, k, v, *seen, out, sums, g)


def _tpu(q: Array, interpret: Any) -> Halves | None:
    """The halves that TPUs' kernels compute; None where none takes such queries."""
    from lmwright.kernels import tpu_long_attention, tpu_row_attention, tpu_row_intervals, tpu_spans

    t, size = q.shape[1], q.shape[3]
    if not tpu_spans.fits(t, size):
        return None
    short = tpu_row_attention.fits(t, size, q.dtype.itemsize)
    unit = 1.0 if short else math.log(2)  # sums of long rows are in powers of two
    turned = lambda a: a.transpose(0, 2, 3, 1)  # noqa: E731
    back = lambda a: a.transpose(0, 3, 1, 2)  # noqa: E731

    def marks(scoring: Scoring, reach: Reach, seen: Interval) -> tuple[Any, tuple[Any, ...]]:
        if short:
            return tpu_row_intervals.IntervalCall(scoring, interpret, reach), (tuple(seen),)
        return tpu_long_attention.Call(scoring, reach, interpret), tuple(in_place(seen))

    module = tpu_row_attention if short else tpu_long_attention

    def forward(scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen: Interval):
        call, marked = marks(scoring, reach, seen)
        out, (*_, sums) = module.forward(call, *map(turned, (q, k, v)), *marked)
        return back(out), sums[:, :, 0].swapaxes(1, 2) * unit

    def backward(
        scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen: Interval, out: Array,
        log_sums: Array, g: Array,
    ):  # fmt: skip
        call, marked = marks(scoring, reach, seen)
        sums = log_sums.swapaxes(1, 2)[:, :, None] / unit
        kept = (*map(turned, (q, k, v)), *marked, turned(out), sums)
        dq, dk, dv, *_ = module.backward(call, kept, turned(g))
        return back(dq), back(dk), back(dv)

    return Halves(forward, backward)


def _gpu(q: Array, interpret: Any) -> Halves | None:
    """The halves that GPUs' kernels compute; None where they do not take such queries."""
    from lmwright.kernels import gpu_attention, gpu_blocks

    t, size = q.shape[1], q.shape[3]
    if not gpu_attention.fits(t, size, q.dtype.itemsize, interpret):
        return None
    unit = math.log(2)  # sums are in powers of two

    def forward(scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen: Interval):
        calls = gpu_blocks.Calls.of(scoring, t, size, interpret)
        out, (*_, sums) = gpu_blocks.forward(calls, q, k, v, in_place(seen))
        return out, sums.swapaxes(1, 2) * unit

    def backward(
        scoring: Scoring, reach: Reach, q: Array, k: Array, v: Array, seen: Interval, out: Array,
        log_sums: Array, g: Array,
    ):  # fmt: skip
        calls = gpu_blocks.Calls.of(scoring, t, size, interpret)
        kept = q, k, v, in_place(seen), out, log_sums.swapaxes(1, 2) / unit
        return gpu_blocks.backward(calls, kept, g)[:3]

    return Halves(forward, backward)
