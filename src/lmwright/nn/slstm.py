"""sLSTM (https://arxiv.org/abs/2405.04517): cells of one number, whose gates see what the cells of
their head gave for the token before.

    z, i, f, o = gates of the token + h R        log f = log sigmoid(f)
    m' = max(log f + m, i)                       f' = e^(log f + m - m'), i' = e^(i - m')
    c' = f' c + i' tanh(z)    n' = f' n + i'     h' = sigmoid(o) c' / n'

One token follows the other: there is no way to compute a row at once. Documents begin afresh, and
padding changes nothing. The backward pass keeps the cells at the beginning of each chunk and
computes the rest again.

B batch, T time, N heads, H cells of a head.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.nn.mlstm import beginnings, documents

GATES = 4  # z, i, f, o
NEVER = -1e30  # the logarithm of nothing


class Cells(NamedTuple):
    """Cells of rows after some token, float32 [B, N, H]; where `norm` is 0, before the first."""

    value: Array
    norm: Array
    scale: Array
    out: Array


def empty(batch_size: int, num_heads: int, head_dim: int) -> Cells:
    """The cells before the first token."""
    return Cells(*(jnp.zeros((batch_size, num_heads, head_dim), jnp.float32) for _ in range(4)))


def slstm(
    cells: Cells, gates: Array, recurrent: Array, ids: Array, chunk_tokens: int
) -> tuple[Array, Cells]:
    """h [B, T, N, H] of gates [B, T, N, 4, H] and R [N, H, 4, H] within the segments `ids` [B, T],
    of which 0 is padding, after the tokens that `cells` have seen; and the cells after these."""
    length = gates.shape[1]
    size = min(chunk_tokens, length)
    begins = beginnings(documents(ids))
    arrays = tuple(_by_token(a, size) for a in (gates, begins, ids > 0))
    step = partial(_token, recurrent)

    @partial(jax.checkpoint, prevent_cse=False)
    def chunk(cells: Cells, arrays: tuple[Array, ...]) -> tuple[Cells, Array]:
        return lax.scan(step, cells, arrays)

    cells, h = lax.scan(chunk, cells, arrays)  # [chunks, L, B, N, H]
    h = h.reshape(-1, *h.shape[2:])[:length]
    return jnp.moveaxis(h, 0, 1).astype(gates.dtype), cells


def _by_token(a: Array, size: int) -> Array:
    """[chunks, L, B, ...] of [B, T, ...]; padding behind the end."""
    a = jnp.pad(jnp.moveaxis(a, 1, 0), ((0, -a.shape[1] % size), *((0, 0),) * (a.ndim - 1)))
    return a.reshape(-1, size, *a.shape[1:])


def _token(
    recurrent: Array, cells: Cells, arrays: tuple[Array, Array, Array]
) -> tuple[Cells, Array]:
    gates, begins, real = arrays  # [B, N, 4, H], [B], [B]
    rows = lambda a: a[:, None, None]  # noqa: E731
    before = Cells(*(jnp.where(rows(begins), 0, a) for a in cells))
    out, recurrent = before.out.astype(gates.dtype), recurrent.astype(gates.dtype)
    seen = jnp.einsum("bnh,nhgk->bngk", out, recurrent, preferred_element_type=jnp.float32)
    z, i, f, o = (a[:, :, 0] for a in jnp.split(gates + seen, GATES, axis=2))
    kept = jax.nn.log_sigmoid(f) + jnp.where(before.norm > 0, before.scale, NEVER)
    scale = jnp.maximum(kept, i)
    keep, write = jnp.exp(kept - scale), jnp.exp(i - scale)
    value, norm = keep * before.value + write * jnp.tanh(z), keep * before.norm + write
    after = Cells(value, norm, scale, jax.nn.sigmoid(o) * value / norm)
    after = Cells(*(jnp.where(rows(real), *pair) for pair in zip(after, before, strict=True)))
    return after, after.out
