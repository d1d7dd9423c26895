"""Marks of mLSTM's tokens, by which its kernel knows the gates: eight numbers a token and head.

With the sums b of log f since the chunk or, within it, the document began, and the scales m
(`nn.mlstm`), the weight of token s for token t of a chunk is

    e^(b_t - b_s + i_s - m_t)    for first_t <= s <= t

so that the scales, a running maximum along the row, are made here, and the kernel takes no maximum.
Scans double their reach from step to step and stop at the first token of a document: nothing is
subtracted that belongs to another one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from lmwright.nn.mlstm import beginnings, documents, gates

NEVER = -1e30  # the logarithm of nothing, which may be added to itself


class Places(NamedTuple):
    """Positions of the tokens of chunks in their documents, int and bool [B, C, L]."""

    first: Array
    """The first token of the chunk in the document of each."""
    fresh: Array
    """True for a token before which, or with which, a document began in the chunk."""
    age: Array
    """Tokens of its document before each, in all chunks."""


def places(ids: Array, size: int) -> Places:
    """The positions of segments `ids` [B, T] in chunks of `size`."""
    begins = beginnings(documents(ids))
    along = jnp.arange(ids.shape[1])
    started = lax.cummax(jnp.where(begins, along, 0), axis=1)
    cut = lambda a: a.reshape(a.shape[0], -1, size)  # noqa: E731
    inside = cut(started) - cut(jnp.broadcast_to(along, ids.shape))[..., :1]
    fresh = jnp.cumsum(cut(begins), axis=-1) > 0
    return Places(jnp.maximum(inside, 0), fresh, cut(along - started))


def scales(i: Array, log_f: Array, where: Places) -> tuple[Array, Array, Array]:
    """Sums b of log f within chunk and document and scales m [B, N, C, L], and the scale before
    each chunk [B, N, C, 1], of gates [B, N, C, L]."""
    size = i.shape[-1]
    place = jnp.arange(size)
    first, fresh = where.first[:, None], where.fresh[:, None]
    total, most, reach = log_f, i, 1
    while reach < size:
        inside = place - reach >= first
        further = jnp.maximum(most, _before(most, reach, NEVER) + total)
        most = jnp.where(inside, further, most)
        total = jnp.where(inside, total + _before(total, reach, 0.0), total)
        reach *= 2
    # the scale after a chunk is max(forgets + the one before, inside), which is a scan of its own
    end = fresh[..., -1]
    forgets = jnp.where(end, NEVER, total[..., -1])
    inside = jnp.maximum(most[..., -1], jnp.where(end, total[..., -1], NEVER))

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.maximum(a[0] + b[0], NEVER), jnp.maximum(a[1] + b[0], b[1])

    forgets, inside = lax.associative_scan(join, (forgets, inside), axis=2)
    after = jnp.maximum(forgets, inside)
    before = jnp.concatenate([jnp.zeros_like(after[..., :1]), after[..., :-1]], axis=-1)[..., None]
    scale = jnp.maximum(total + jnp.where(fresh, 0.0, before), most)
    return total, scale, before


def sums_after(a: Array, where: Places) -> Array:
    """The sum of a [B, N, C, L] over each token and those after it in its document, in all
    chunks."""
    b, n, c, size = a.shape
    age = where.age.reshape(b, 1, c * size)
    a, reach = a.reshape(b, n, c * size), 1
    while reach < c * size:
        same = _after(age, reach) >= reach  # as old as the distance: of the same document
        a = jnp.where(same, a + _after(a, reach), a)
        reach *= 2
    return a.reshape(b, n, c, size)


def _before(a: Array, steps: int, fill: float) -> Array:
    """a [..., L] of the token `steps` earlier."""
    return jnp.pad(a[..., :-steps], ((0, 0),) * (a.ndim - 1) + ((steps, 0),), constant_values=fill)


def _after(a: Array, steps: int) -> Array:
    """a [..., L] of the token `steps` later, 0 behind the end."""
    return jnp.pad(a[..., steps:], ((0, 0),) * (a.ndim - 1) + ((0, steps),))


def log_gates(i: Array, f: Array, ids: Array, size: int) -> tuple[Array, Array]:
    """Logarithms of the gates [B, N, C, L] of what goes into them [B, T, N]."""
    i, log_f = gates(i, f, ids)
    return by_chunk(jnp.maximum(i, NEVER), size), by_chunk(log_f, size)


def by_chunk(a: Array, size: int) -> Array:
    """[B, N, C, L] of a [B, T, N], in chunks of `size` tokens."""
    return jnp.moveaxis(a, 1, 2).reshape(a.shape[0], a.shape[2], -1, size)


class Marks(NamedTuple):
    """Rows that a kernel reads, float32 [B, N, C, L]."""

    total: Array
    """b."""
    log_input: Array
    """i."""
    scale: Array
    """m."""
    carried: Array
    """Share of the memory before the chunk."""
    last: Array
    """Weight of the token in the memory after the chunk."""
    first: Array
    """First token of the chunk that it sees."""

    def stacked(self, *two: Array) -> Array:
        """[B, N, C, 8, L] with two more rows."""
        return jnp.stack([*self, *two], axis=3)


def marks(i: Array, scaled: tuple[Array, Array, Array], where: Places) -> Marks:
    """The rows for log gates i [B, N, C, L], and what `scales` returned for them."""
    total, scale, before = scaled
    fresh, first = where.fresh[:, None], where.first[:, None]
    carried = jnp.exp(jnp.where(fresh, NEVER, total + before - scale))
    mine = jnp.arange(i.shape[-1]) >= first[..., -1:]
    last = jnp.exp(jnp.where(mine, total[..., -1:] - total + (i - scale[..., -1:]), NEVER))
    wide = jnp.broadcast_to(first, i.shape).astype(jnp.float32)
    return Marks(total, i, scale, carried, last, wide)
