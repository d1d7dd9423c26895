"""Causal convolution along a row, one filter for each number of a token, within documents.

    y_t = bias + sum over j < W of w_j x_(t - j)        none before the document's first token

W tokens of a window, B batch, T time; the other axes belong to the numbers of a token.
"""

import jax.numpy as jnp
from jax import Array, lax

from lmwright.nn.for_all import plus, times
from lmwright.nn.mlstm import documents


def causal_conv(x: Array, w: Array, bias: Array | None, ids: Array) -> Array:
    """[B, T, ...] of x [B, T, ...], filters w [W, ...] of the token itself first, bias [...] if any
    and segments `ids` [B, T], where padding (0) stands around documents, not in them."""
    docs = jnp.where(ids > 0, documents(ids), 0)
    y = times(x, w[0])
    y = y if bias is None else plus(y, bias)
    for j in range(1, w.shape[0]):
        before = jnp.pad(docs[:, :-j], ((0, 0), (j, 0)), constant_values=-1)
        rest = ((0, 0),) * (x.ndim - 2)
        earlier = jnp.pad(x[:, :-j], ((0, 0), (j, 0), *rest))[:, : x.shape[1]]
        mine = (before[:, : x.shape[1]] == docs).reshape(*docs.shape, *(1,) * (x.ndim - 2))
        y += times(jnp.where(mine, earlier, 0), w[j])
    return y


def conv_from(
    state: Array, x: Array, w: Array, bias: Array | None, real: Array
) -> tuple[Array, Array]:
    """`causal_conv` of tokens after the W - 1 of `state`, of one document, and the state after
    them; padding, where `real` [B, T] is False, is passed over wherever it stands."""
    width = w.shape[0]
    row = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    known = jnp.concatenate([jnp.ones((len(x), width - 1), bool), real], axis=1)
    order = jnp.argsort(~known, axis=1, stable=True)  # places of tokens, without padding
    number = jnp.cumsum(known, axis=1) - 1

    def tokens(numbers: Array) -> Array:
        places = jnp.take_along_axis(order, jnp.maximum(numbers, 0), axis=1)
        return jnp.take_along_axis(row, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), 1)

    mine = number[:, width - 1 :]
    y = w[0].astype(x.dtype) * x
    y = y if bias is None else bias.astype(x.dtype) + y
    for j in range(1, width):
        y += w[j].astype(x.dtype) * tokens(mine - j)
    after = tokens(number[:, -1:] - lax.iota(jnp.int32, width - 1)[::-1])
    return y, after.astype(state.dtype)
