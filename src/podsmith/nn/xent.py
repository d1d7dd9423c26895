"""Cross-entropy in chunks: [B, T, V] logits never exist as a whole.

The forward pass takes each chunk's gradient at once, so logits are computed a single time:

    x [B, T, D] --split--> [B, C, D] --logits_fn--> [B, C, V] --> loss, dx, dw
                                                                  (kept for the backward pass)

z-loss as in PaLM (https://arxiv.org/abs/2204.02311): z * log(Z)^2.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from podsmith.core.param import Tree

LogitsFn = Callable[[Tree, Array], Array]


class Xent(NamedTuple):
    """Sums over tokens, float32 scalars; only `total` carries a gradient."""

    total: Array
    nll: Array
    z: Array
    correct: Array


def token_sums(logits: Array, targets: Array, weights: Array, z_loss: float) -> Xent:
    """Sums for float32 logits [..., V], int targets and float32 weights [...]."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = jnp.sum((log_z - chosen) * weights)
    z = jnp.sum(jnp.square(log_z) * weights)
    correct = jnp.sum((jnp.argmax(logits, axis=-1) == targets) * weights)
    return Xent(nll + z_loss * z, nll, z, correct)


def chunked_xent(
    logits_fn: LogitsFn,
    w: Tree,
    x: Array,
    targets: Array,
    weights: Array,
    *,
    chunk: int,
    z_loss: float = 0.0,
) -> Xent:
    """Sums over all tokens of x [B, T, D], `chunk` tokens of each row at a time.

    `logits_fn(w, x)` gives [..., V]; targets int32 and weights float32 are [B, T].
    """
    t = x.shape[1]
    chunk = min(chunk, t)
    pad = -t % chunk
    if pad:
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0)))
        targets, weights = (jnp.pad(a, ((0, 0), (0, pad))) for a in (targets, weights))
    return _xent(logits_fn, chunk, z_loss, w, x, targets, weights)


def _split(a: Array, chunk: int) -> Array:
    b, t = a.shape[:2]
    return jnp.moveaxis(a.reshape(b, t // chunk, chunk, *a.shape[2:]), 1, 0)


def _one(
    logits_fn: LogitsFn, z_loss: float, targets: Array, weights: Array, w: Tree, x: Array
) -> tuple[Array, Xent]:
    sums = token_sums(logits_fn(w, x).astype(jnp.float32), targets, weights, z_loss)
    return sums.total, sums


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _xent(
    logits_fn: LogitsFn,
    chunk: int,
    z_loss: float,
    w: Tree,
    x: Array,
    targets: Array,
    weights: Array,
) -> Xent:
    def body(sums: Xent, piece: tuple[Array, Array, Array]) -> tuple[Xent, None]:
        xc, tc, wc = piece
        _, new = _one(logits_fn, z_loss, tc, wc, w, xc)
        return jax.tree.map(jnp.add, sums, new), None

    pieces = tuple(_split(a, chunk) for a in (x, targets, weights))
    return jax.lax.scan(body, Xent(*[jnp.zeros((), jnp.float32)] * 4), pieces)[0]


def _xent_fwd(
    logits_fn: LogitsFn,
    chunk: int,
    z_loss: float,
    w: Tree,
    x: Array,
    targets: Array,
    weights: Array,
) -> tuple[Xent, tuple[Tree, Array, Array, Array]]:
    def body(carry: tuple[Xent, Tree], piece: tuple[Array, Array, Array]):
        sums, dw = carry
        xc, tc, wc = piece
        fn = partial(_one, logits_fn, z_loss, tc, wc)
        (_, new), (dwc, dxc) = jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)(w, xc)
        return (jax.tree.map(jnp.add, sums, new), jax.tree.map(jnp.add, dw, dwc)), dxc

    zeros = (Xent(*[jnp.zeros((), jnp.float32)] * 4), jax.tree.map(jnp.zeros_like, w))
    pieces = tuple(_split(a, chunk) for a in (x, targets, weights))
    (sums, dw), dx = jax.lax.scan(body, zeros, pieces)
    dx = jnp.moveaxis(dx, 0, 1).reshape(x.shape)
    return sums, (dw, dx, targets, weights)


def _xent_bwd(logits_fn, chunk, z_loss, kept, cotangent: Xent):
    dw, dx, targets, weights = kept
    g = cotangent.total  # the other sums are metrics
    scale = lambda a: (a * g).astype(a.dtype)  # noqa: E731
    return (
        jax.tree.map(scale, dw),
        scale(dx),
        jnp.zeros(targets.shape, jax.dtypes.float0),
        jnp.zeros_like(weights),
    )


_xent.defvjp(_xent_fwd, _xent_bwd)
