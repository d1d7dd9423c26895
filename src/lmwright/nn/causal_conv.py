"""Causal convolution along a row, one filter for each number of a token, within documents.

    y_t = bias + sum over j < W of w_j x_(t - j)        none before the document's first token

W tokens of a window, B batch, T time; the other axes belong to the numbers of a token.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.nn.mlstm import documents


@jax.custom_vjp
def causal_conv(x: Array, w: Array, bias: Array | None, ids: Array) -> Array:
    """[B, T, ...] of x [B, T, ...], filters w [W, ...] of the token itself first, bias [...] if any
    and segments `ids` [B, T], where padding (0) stands around documents, not in them. Gradients of
    filters and bias are summed in float32."""
    y = x * w[0].astype(x.dtype)
    for j in range(1, w.shape[0]):
        y += _later(x, j, ids) * w[j].astype(x.dtype)
    return y if bias is None else y + bias.astype(x.dtype)


def _fwd(
    x: Array, w: Array, bias: Array | None, ids: Array
) -> tuple[Array, tuple[Array, Array, Array | None, Array]]:
    return causal_conv(x, w, bias, ids), (x, w, bias, ids)


def _bwd(
    kept: tuple[Array, Array, Array | None, Array], g: Array
) -> tuple[Array, Array, Array | None, None]:
    x, w, bias, ids = kept
    change, wide = g * w[0].astype(g.dtype), g.astype(jnp.float32)
    for j in range(1, w.shape[0]):
        change += _sooner(g, j, ids) * w[j].astype(g.dtype)
    along = [x if j == 0 else _later(x, j, ids) for j in range(w.shape[0])]
    of_filters = jnp.stack([jnp.sum(wide * a.astype(jnp.float32), (0, 1)) for a in along])
    of_bias = None if bias is None else jnp.sum(wide, (0, 1)).astype(bias.dtype)
    return change, of_filters.astype(w.dtype), of_bias, None


causal_conv.defvjp(_fwd, _bwd)


def _later(x: Array, steps: int, ids: Array) -> Array:
    """x [B, T, ...] of the token `steps` before each, 0 where that is of another document."""
    return jnp.where(_same(ids, steps, x), _moved(x, steps), 0)


def _sooner(x: Array, steps: int, ids: Array) -> Array:
    """x [B, T, ...] of the token `steps` after each, 0 where that is of another document."""
    return jnp.where(_same(ids, -steps, x), _moved(x, -steps), 0)


def _same(ids: Array, steps: int, like: Array) -> Array:
    """bool [B, T, 1, ...]: where a token is of the same document as the one `steps` before it."""
    docs = jnp.where(ids > 0, documents(ids), 0)
    mine = _moved(docs, steps, fill=-1) == docs
    return mine.reshape(*docs.shape, *(1,) * (like.ndim - 2))


def _moved(a: Array, steps: int, fill: int = 0) -> Array:
    """a [B, T, ...] of the token `steps` before each, or after where it is negative."""
    sides = (max(steps, 0), max(-steps, 0))
    padded = jnp.pad(a, ((0, 0), sides, *((0, 0),) * (a.ndim - 2)), constant_values=fill)
    start = max(-steps, 0)
    return padded[:, start : start + a.shape[1]]


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
