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
    docs, y = _documents(ids), x * w[0].astype(x.dtype)
    for j in range(1, w.shape[0]):
        y += _near(x, j, docs) * w[j].astype(x.dtype)
    return y if bias is None else y + bias.astype(x.dtype)


def _fwd(
    x: Array, w: Array, bias: Array | None, ids: Array
) -> tuple[Array, tuple[Array, Array, Array | None, Array]]:
    return causal_conv(x, w, bias, ids), (x, w, bias, ids)


def _bwd(
    residuals: tuple[Array, Array, Array | None, Array], g: Array
) -> tuple[Array, Array, Array | None, None]:
    x, w, bias, ids = residuals
    docs, change, wide = _documents(ids), g * w[0].astype(g.dtype), g.astype(jnp.float32)
    along = [x]
    for j in range(1, w.shape[0]):
        change += _near(g, -j, docs) * w[j].astype(g.dtype)
        along.append(_near(x, j, docs))
    of_filters = jnp.stack([jnp.sum(wide * a.astype(jnp.float32), (0, 1)) for a in along])
    of_bias = None if bias is None else jnp.sum(wide, (0, 1)).astype(bias.dtype)
    return change, of_filters.astype(w.dtype), of_bias, None


causal_conv.defvjp(_fwd, _bwd)


def _documents(ids: Array) -> Array:
    """int [B, T]: the document of each token; 0 for padding."""
    return jnp.where(ids > 0, documents(ids), 0)


def _near(x: Array, steps: int, docs: Array) -> Array:
    """x [B, T, ...] of the token `steps` before each, or behind it where `steps` is negative; 0
    where that is of another document."""
    mine = _moved(docs, steps, fill=-1) == docs
    return jnp.where(mine.reshape(*docs.shape, *(1,) * (x.ndim - 2)), _moved(x, steps), 0)


def _moved(a: Array, steps: int, fill: int = 0) -> Array:
    """a [B, T, ...] of the token `steps` before each; `fill` where there is none."""
    before, behind = max(steps, 0), max(-steps, 0)
    around = ((0, 0), (before, behind), *((0, 0),) * (a.ndim - 2))
    return jnp.pad(a, around, constant_values=fill)[:, behind : behind + a.shape[1]]


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
