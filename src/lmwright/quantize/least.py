"""Codes for a scale, and the search for the scale with the least error."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.rounding import Grid


def codes_of(w: Array, scale: Array, rule: Grid) -> Array:
    """The nearest integers of w for a scale, as floats; zero where that is zero."""
    return jnp.clip(rule.whole(ratio(w, scale)), rule.low, rule.high)


def ratio(a: Array, b: Array) -> Array:
    """a / b, zero where b is."""
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))


def least(
    start: tuple[Array, ...],
    tried: Sequence[object],
    of: Callable[[Array], tuple[Array, ...]],
) -> tuple[Array, ...]:
    """The numbers with the least error, each of the shape of that: `start`, or those of what was
    `tried`, for which `of` gives the error and the numbers. The first of equal ones is taken."""

    def one(best: tuple[Array, ...], each: Array) -> tuple[tuple[Array, ...], None]:
        found = of(each)
        better = found[0] < best[0]
        return tuple(jnp.where(better, *pair) for pair in zip(found, best, strict=True)), None

    first = jnp.full_like(start[0], jnp.inf), *start
    return lax.scan(one, first, jnp.asarray(tried, jnp.float32))[0][1:]
