"""Causal attention with sinks (https://arxiv.org/abs/2309.17453, as gpt-oss has them,
https://arxiv.org/abs/2508.10925): a learned number for each head is one more score under the
softmax, whose key has no value.

    whole rows        the platform's kernels (`halves`), without sinks
                      sums' = log(exp(sums) + exp(sink))       out' = out exp(sums - sums')
                      and their backward pass, which reads no more than out' and sums'
    over `context`    the same behind an exchange of heads for tokens; rings and windows of
                      `window_attention` add sinks to their own sums
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.compute import Compute
from lmwright.core.sharding import by_shard, context_ways
from lmwright.kernels import all_to_all_attention, window_attention
from lmwright.kernels.halves import halves_for
from lmwright.kernels.online_softmax import along, named, sink_gradients, with_sinks
from lmwright.nn import attention
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach, causal, causal_reach


def attend_by(
    compute: Compute, *, kernel: str | None = None, interpret: Any = False
) -> Callable[..., Array]:
    """`attend(q, k, v, sinks, segment_ids, scoring)`: as `nn.attention.causal_attention` with sinks
    [N]. `kernel` and `interpret` are for tests."""
    kernel = kernel or compute.kernels

    def run(q: Array, k: Array, v: Array, sinks: Array, ids: Array, scoring: Scoring) -> Array:
        if context_ways() > 1 and compute.context_attention == "ring":
            near = window_attention.attend
            return window_attention.causal_attention(near, q, k, v, ids, scoring, sinks)
        if context_ways() > 1:
            local = partial(_traded, kernel, interpret, scoring)
        elif kernel == "reference":
            return attention.causal_attention(q, k, v, ids, scoring, sinks)
        else:
            local = partial(_local, kernel, interpret, scoring)
        return by_shard(local, "heads")(q, k, v, ids, sinks)

    return run


def _local(
    kernel: str, interpret: Any, scoring: Scoring, q: Array, k: Array, v: Array, ids: Array,
    sinks: Array,
) -> Array:  # fmt: skip
    """One device's part, of whole rows."""
    seen, reach = causal(ids, scoring.window), causal_reach(scoring.window)
    program = _Program(kernel, interpret, scoring._replace(window=None), reach)
    return _with_sinks(program, q, k, v, sinks.astype(jnp.float32), seen)


def _traded(
    kernel: str, interpret: Any, scoring: Scoring, q: Array, k: Array, v: Array, ids: Array,
    sinks: Array,
) -> Array:  # fmt: skip
    """One device's part of rows that are cut over `context`."""
    heads = sinks.shape[0] // lax.axis_size(all_to_all_attention.AXIS)
    first = lax.axis_index(all_to_all_attention.AXIS) * heads
    own = lax.dynamic_slice_in_dim(sinks, first, heads)
    attend = partial(_local, kernel, interpret, scoring, sinks=own)
    return all_to_all_attention.traded(attend, q, k, v, ids)


class _Program(NamedTuple):
    """Static arguments."""

    kernel: str
    interpret: Any
    scoring: Scoring
    reach: Reach


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_sinks(
    program: _Program, q: Array, k: Array, v: Array, sinks: Array, seen: Interval
) -> Array:
    """Attention of q [B, T, N, H] to k, v [B, T, K, H] within `seen`, and to float32 sinks [N]."""
    return _forward(program, q, k, v, sinks, seen)[0]


def _forward(program: _Program, q: Array, k: Array, v: Array, sinks: Array, seen: Interval):
    halves = halves_for(program.kernel, q, program.interpret)
    out, sums = halves.forward(program.scoring, program.reach, q, k, v, seen)
    out, total = named(*with_sinks(out.astype(q.dtype), sums, sinks[None, None]))  # [B, T, N]
    return out, (q, k, v, sinks, seen, out, total)


def _backward(program: _Program, residuals: tuple[Any, ...], g: Array):
    q, k, v, sinks, seen, out, total = residuals
    backward = halves_for(program.kernel, q, program.interpret).backward
    grads = backward(program.scoring, program.reach, q, k, v, Interval(*seen), out, total, g)
    dq, dk, dv = (d.astype(a.dtype) for d, a in zip(grads, (q, k, v), strict=True))
    dsinks = sink_gradients(sinks[None, None], total, along(out, g))
    return dq, dk, dv, dsinks[0, 0], None


_with_sinks.defvjp(_forward, _backward)
