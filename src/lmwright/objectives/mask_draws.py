"""How many tokens of each row are masked, and which: times that are spread evenly over a batch.

    numbers of rows   0   1   2   3   4   5   6   7      a batch of a power of two
    parts             0   4   6   2   5   1   3   7      one row's time in each equal part of [0, 1)

Any 2^b rows that follow each other, by ones or by another power of two, have one time in each
of 2^b equal parts, too (the second dimension of a Sobol sequence,
https://doi.org/10.1016/0041-5553(67)90144-9). These are the rows of a device in a microbatch,
however a batch is cut: together they have little more than half of their tokens masked, which is
known before they are drawn.
"""

from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lmwright.core.contract import Batch
from lmwright.core.sharding import batch_ways, context_ways
from lmwright.objectives.masking import ordered

MOST_ROWS = 16  # whose masks are picked together: more save less than a 30th of the head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draws:
    """Randomness of the rows of a batch."""

    keys: Array
    """[B]: which tokens are masked."""
    time: Array
    """float32 [B] in [0, 1): how many."""
    spread: int = field(default=1, metadata={"static": True})
    """Rows, one after the other, that have one time in each of so many equal parts."""


class Masks(NamedTuple):
    """Tokens of rows that are masked."""

    masked: Array
    """bool [B, T]."""
    weights: Array
    """Their weights in the loss, float32 [B, T]; zeros for others."""


def parts_of(numbers: Array, count: int, shift: Array) -> Array:
    """The part of [0, 1) of each row of a batch, of `count` equal ones: each has one row, and any
    row any part by the random `shift`."""
    if not _is_power(count):
        return (numbers + shift) % count
    digits = count.bit_length() - 1
    columns = [
        sum(1 << (digits - 1 - i) for i in range(digits) if i & j == i) for j in range(digits)
    ]
    bits = [jnp.where((numbers >> j) & 1, column, 0) for j, column in enumerate(columns)]
    return reduce(jnp.bitwise_xor, bits, jnp.broadcast_to(shift, numbers.shape))


def draw(keys: Array, parts: Array, count: int, spread: int = 1) -> Draws:
    """Draws by keys [B], with times in the given ones [B] of `count` equal parts of [0, 1)."""
    keys, others = jax.vmap(jax.random.split, out_axes=1)(keys)
    times = (parts + jax.vmap(jax.random.uniform)(others)) / count
    return Draws(keys, jnp.minimum(times, jnp.nextafter((parts + 1) / count, 0.0)), spread)


def spread_of(num_rows: int, count: int) -> int:
    """The `spread` of so many rows of a batch of `count`, by `parts_of`."""
    return num_rows if _is_power(count) and _is_power(num_rows) else 1


def mask_rows(batch: Batch, draws: Draws) -> Masks:
    """Each row has exactly floor(time n) + 1 of its n tokens masked."""
    learned = (batch.segment_ids > 0) & (batch.loss_weight > 0)
    count = jnp.sum(learned, axis=1, keepdims=True)  # [B, 1]
    masks = jnp.floor(draws.time[:, None] * count).astype(jnp.int32) + 1
    masks = jnp.minimum(masks, count)
    length = batch.tokens.shape[1]
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(draws.keys)
    masked = learned & (ordered(learned, uniform)[1] < masks)
    weights = jnp.where(masked, batch.loss_weight * count / jnp.maximum(masks, 1), 0.0)
    return Masks(masked, weights)


def rows_together(num_rows: int, spread: int) -> int:
    """Rows whose masks are picked together: those of a device, in the program being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    ways = 1 if mesh.empty else batch_ways(mesh)
    if num_rows % ways or context_ways() > 1:
        return 1
    return int(np.gcd(np.gcd(num_rows // ways, spread), MOST_ROWS))


def most_masks(num_rows: int, num_tokens: int) -> int:
    """Those of rows of so many tokens, whose times are in as many equal parts."""
    parts = range(1, num_rows + 1)
    return min(sum(-(-part * num_tokens // num_rows) for part in parts), num_rows * num_tokens)


def pick(masked: Array, together: int, most: int, *arrays: Array) -> list[Array]:
    """`most` places of each group of rows, the masked ones first: [B / together, most, ...] of
    arrays [B, T, ...]."""
    join = lambda a: a.reshape(-1, together * a.shape[1], *a.shape[2:])  # noqa: E731
    places = jnp.argsort(~join(masked), axis=1)[:, :most]

    def at_places(a: Array) -> Array:
        index = lax.expand_dims(places, range(2, a.ndim))
        return jnp.take_along_axis(join(a), index, axis=1)

    return list(map(at_places, arrays))


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0
