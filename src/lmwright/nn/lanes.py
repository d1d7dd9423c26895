"""Lanes: tokens of several adapters, which experts compute as one batch.

    [L, B, T, D] --> rows [B L, T, D] --> sorted by expert, in an expert by lane --> [L, B, T, D]

Products with the experts' own matrices see all rows of an expert as one group. Factors of all
lanes lie side by side, [E, D, L R] and [E, L R, F], and of the narrow results between them a row
keeps those of its own lane: L R is seldom wider than what a TPU computes at once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.leaves import Lora
from lmwright.core.weight import Weight

Fn = Callable[..., tuple[Array, ...]]


def all_at_once(fn: Fn) -> Callable[..., tuple[Array, ...]]:
    """`fn(lanes, w, *rows)` of weights w and arrays [B, ...], made such that a `vmap` around it
    takes the rows of all lanes at once. `lanes` is how many have factors of their own in w."""

    def alone(w: dict[str, Weight], *rows: Array) -> tuple[Array, ...]:
        return fn(1, w, *rows)

    whole = jax.custom_batching.custom_vmap(alone)

    @whole.def_vmap
    def of_lanes(num: int, mapped: Any, w: dict[str, Weight], *rows: Array) -> tuple[Any, Any]:
        own = any(jax.tree.leaves(mapped[0]))
        w = {name: side_by_side(leaf) if own and isinstance(leaf, Lora) else leaf
             for name, leaf in w.items()}  # fmt: skip
        folded = [
            (a if is_mapped else jnp.broadcast_to(a, (num, *a.shape))).swapaxes(0, 1)
            for a, is_mapped in zip(rows, mapped[1:], strict=True)
        ]
        out = fn(num if own else 1, w, *(a.reshape(-1, *a.shape[2:]) for a in folded))
        out = tuple(a.reshape(-1, num, *a.shape[1:]).swapaxes(0, 1) for a in out)
        return out, (True,) * len(out)

    return whole


def side_by_side(leaf: Lora) -> Lora:
    """Factors a [L, E, D, R] and b [L, E, R, F] as [E, D, L R] and [E, L R, F]."""
    a, b = jnp.moveaxis(leaf.a, 0, 2), jnp.moveaxis(leaf.b, 0, 1)
    return replace(leaf, a=a.reshape(*a.shape[:2], -1), b=b.reshape(len(b), -1, b.shape[-1]))


def numbered(experts: Array, lanes: int) -> Array:
    """Choices [B, T, k] of rows, each of lane `row % lanes`, as numbers of expert and lane."""
    return experts * lanes + (jnp.arange(len(experts)) % lanes)[:, None, None]


def groups(sizes: Array, lanes: int, num_rows: int) -> tuple[Array, Array | None]:
    """Sizes [E] of the groups of experts, of `sizes` [E L] of those of expert and lane, and bool
    [rows, L]: the lane of each row; None where there is one lane."""
    if lanes == 1:
        return sizes, None
    group = jnp.sum(jnp.arange(num_rows)[:, None] >= jnp.cumsum(sizes), axis=1)
    return jnp.sum(sizes.reshape(-1, lanes), axis=1), group[:, None] % lanes == jnp.arange(lanes)
