"""Draws of masked tokens, how many of each row and which: times that are spread evenly over a
batch.

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
from lmwright.nn.intervals import Interval

MOST_ROWS = 16  # whose masks are picked together: more save less than a 30th of the head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draws:
    """Randomness of the rows of a batch."""

    keys: Array
    """Keys [B] that choose which tokens are masked."""
    time: Array
    """Times float32 [B] in [0, 1) that set how many tokens are masked."""
    spread: int = field(default=1, metadata={"static": True})
    """Rows, one after the other, that have one time in each of so many equal parts."""


class Masks(NamedTuple):
    """Tokens of rows that are masked."""

    masked: Array
    """bool [B, T]."""
    weights: Array
    """Weights of the masked tokens in the loss, float32 [B, T]; zeros for others."""


def parts_of(numbers: Array, count: int, shift: Array) -> Array:
    """The part of [0, 1), one of `count` equal ones, that each row of a batch has. Every part
    belongs to one row; the random `shift` changes which."""
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


def mask_rows(batch: Batch, draws: Draws, block: Interval | None = None) -> Masks:
    """Masks exactly floor(time n) + 1 of the n tokens of each row, or of each of its blocks, which
    have times of their own; `block` gives for each token the tokens of its block."""
    learned, block = _learned(batch), block or _whole(batch)
    count, times = _sums(learned, block), _times(batch, draws, block)
    masks = jnp.minimum(jnp.floor(times * count).astype(jnp.int32) + 1, count)
    length = batch.tokens.shape[1]
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(draws.keys)
    order = jnp.lexsort((jnp.where(learned, uniform, 2.0), block.start), axis=1)
    masked = learned & (jnp.argsort(order, axis=1) - block.start < masks)
    return Masks(masked, _weights(batch, masked, count, masks))


def complementary(batch: Batch, masks: Masks, block: Interval | None = None) -> tuple[Masks, Masks]:
    """The masks, and those of all tokens that they leave out: each token is masked once. Where they
    leave out none of a row, or block, they weigh twice."""
    learned, block = _learned(batch), block or _whole(batch)
    others = learned & ~masks.masked
    count, rest = _sums(learned, block), _sums(others, block)
    twice = jnp.where(rest > 0, masks.weights, 2 * masks.weights)
    return Masks(masks.masked, twice), Masks(others, _weights(batch, others, count, rest))


def _learned(batch: Batch) -> Array:
    return (batch.segment_ids > 0) & (batch.loss_weight > 0)


def _whole(batch: Batch) -> Interval:
    start = jnp.zeros_like(batch.tokens)
    return Interval(start, start + start.shape[1])


def _weights(batch: Batch, masked: Array, count: Array, masks: Array) -> Array:
    return jnp.where(masked, batch.loss_weight * count / jnp.maximum(masks, 1), 0.0)


def _sums(which: Array, block: Interval) -> Array:
    """Number of tokens of its block that are among these, for each token: int32 [B, T]."""
    before = jnp.pad(jnp.cumsum(which, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    at = lambda places: jnp.take_along_axis(before, places, axis=1)  # noqa: E731
    return at(block.end) - at(block.start)


def _times(batch: Batch, draws: Draws, block: Interval) -> Array:
    """The time of each token's block, float32 [B, T]: as many equal parts of [0, 1) as there are
    blocks have one each, in random order; within a part it is the row's time."""
    length = block.start.shape[1]
    begins = (block.start == jnp.arange(length)) & (batch.segment_ids > 0)
    draw = lambda key: jax.random.uniform(jax.random.fold_in(key, 2), (length,))  # noqa: E731
    chance = jnp.where(begins, jax.vmap(draw)(draws.keys), 2.0)
    part = jnp.argsort(jnp.argsort(chance, axis=1), axis=1)
    count = jnp.maximum(jnp.sum(begins, axis=1, keepdims=True), 1)
    time = (part + draws.time[:, None]) / count
    return jnp.take_along_axis(time, block.start, axis=1)


def rows_together(num_rows: int, spread: int) -> int:
    """Number of rows whose masks are picked together: those of a device, in the program being
    traced."""
    mesh = jax.sharding.get_abstract_mesh()
    ways = 1 if mesh.empty else batch_ways(mesh)
    if num_rows % ways or context_ways() > 1:
        return 1
    return int(np.gcd(np.gcd(num_rows // ways, spread), MOST_ROWS))


def most_masks(num_rows: int, num_tokens: int) -> int:
    """The most masks that `num_rows` rows of `num_tokens` tokens have together, with one time in
    each of `num_rows` equal parts."""
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
