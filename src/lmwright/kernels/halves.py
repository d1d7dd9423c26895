"""Attention to intervals of keys in its two halves, forward and backward, as each platform's
kernels compute them: for functions that change results and sums in between.

    forward    q, k, v, seen                        --> out, logs of the softmax sums
    backward   q, k, v, seen, out, log sums, g      --> gradients of q, k and v

The backward pass reads no more than `out` and the sums, as in FlashAttention
(https://arxiv.org/abs/2205.14135). Both may be those of a softmax over more keys than `seen`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from lmwright.kernels.online_softmax import (
    along,
    finished,
    grouped,
    no_sums,
    pair_gradients,
    softmax_sums,
    ungrouped,
)
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach, in_place


class Halves(NamedTuple):
    """Forward and backward kernels for one interval of keys."""

    forward: Callable[..., tuple[Array, Array]]
    """(scoring, reach, q, k, v, seen) to [B, T, N, H] and logs of the softmax sums [B, T, N]."""
    backward: Callable[..., tuple[Array, Array, Array]]
    """(scoring, reach, q, k, v, seen, out, log_sums, g) to gradients of q, k and v."""


def halves_for(kernel: str, q: Array, interpret: Any = False) -> Halves:
    """The halves for queries [B, T, N, H], by the kernels of a platform (`core.compute.Kernels`)
    where they take such; elsewhere in plain XLA."""
    plain = Halves(_forward, _backward)
    if kernel == "cpu":
        return Halves(_cpu_forward, _cpu_backward)
    if kernel == "tpu":
        return _tpu(q, interpret) or plain
    return (_gpu(q, interpret) or plain) if kernel == "gpu" else plain


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
