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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.sharding import by_shard
from lmwright.kernels import select
from lmwright.kernels.halves import Halves, halves_for
from lmwright.kernels.online_softmax import named
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import (
    Interval,
    Reach,
    blocks,
    blocks_reach,
    both_ways,
    own_block,
)


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
        return halves_for(self.kernel, q, self.interpret)


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
