"""Walks of attention in blocks: which blocks of keys a block of queries meets, and the reverse.

A walk leaves out the blocks before the first key and after the last key of its queries, and tells
blocks that are seen whole, which need no mask, from those that are seen in part.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from lmwright.nn.intervals import Interval

Sums = tuple[Array, ...]


class Walk(NamedTuple):
    """Blocks that a block meets: `first` to `end`; all tokens see each other from `full` to
    `full_end`. int32 [B, blocks] in arrays, scalars in a kernel."""

    first: Any
    full: Any
    full_end: Any
    end: Any

    def at(self, number: Any) -> "Walk":
        """The walk of one block."""
        return Walk(*(side[number] for side in self))

    def run(self, step: Callable[[bool, Any, Sums], Sums], sums: Sums) -> Sums:
        """`step(masked, block, sums)` over the blocks."""
        sums = lax.fori_loop(self.first, self.full, partial(step, True), sums)
        sums = lax.fori_loop(self.full, self.full_end, partial(step, False), sums)
        return lax.fori_loop(self.full_end, self.end, partial(step, True), sums)


def walk_of_queries(seen: Interval, block_q: int, block_k: int) -> Walk:
    """Blocks of keys that each block of queries meets."""
    starts, ends = (a.reshape(a.shape[0], -1, block_q) for a in seen)
    first = starts.min(axis=2) // block_k
    end = -(-ends.max(axis=2) // block_k)
    full = jnp.clip(-(-starts.max(axis=2) // block_k), first, end)
    full_end = jnp.clip(ends.min(axis=2) // block_k, full, end)
    return Walk(first, full, full_end, end)


def walk_of_keys(seen: Interval, block_q: int, block_k: int) -> Walk:
    """Blocks of queries that each block of keys meets."""
    starts, ends = (a.reshape(a.shape[0], 1, -1, block_q) for a in seen)
    key = jnp.arange(0, seen.start.shape[1], block_k, dtype=jnp.int32)[:, None]
    meet = (starts.min(axis=3) < key + block_k) & (ends.max(axis=3) > key)
    whole = (starts.max(axis=3) <= key) & (ends.min(axis=3) >= key + block_k)
    first, end = _first(meet), _end(meet)
    full, full_end = (jnp.clip(a, first, end) for a in (_first(whole), _end(whole)))
    # blocks seen in part may lie between: then none is taken as whole
    gap = jnp.sum(whole, axis=2) < full_end - full
    return Walk(first, full, jnp.where(gap, full, jnp.maximum(full, full_end)), end)


def _first(flags: Array) -> Array:
    return jnp.argmax(flags, axis=2).astype(jnp.int32)


def _end(flags: Array) -> Array:
    last = flags.shape[2] - jnp.argmax(flags[:, :, ::-1], axis=2).astype(jnp.int32)
    return jnp.where(jnp.any(flags, axis=2), last, 0)
