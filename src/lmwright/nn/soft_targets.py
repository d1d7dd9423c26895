"""Distillation loss in chunks: the [B, T, V] logits of student and teacher never exist as a whole.

    student  x [B, T, D]  --split--> [B, C, D]  --> logits [B, C, V] --+--> loss, dx, dw
    teacher  y [B, T, D'] --split--> [B, C, D'] --> logits [B, C, V] --+    (kept for the backward
                                                                             pass)

A token's loss, with the teacher's distribution p and the student's q at a temperature t
(https://arxiv.org/abs/1503.02531; t^2 keeps the size of the gradient):

    (1 - alpha) (-log q_1(target)) + alpha t^2 KL(p_t || q_t)

As in `nn.xent`, the forward pass takes the gradient at once. The teacher takes none.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Tree
from lmwright.core.sharding import constrain, join_chunks, token_chunks
from lmwright.nn.xent import LogitsFn, in_chunks, logits_gradient

Head = tuple[Tree, Array]
"""Weights of the logits, and the residual stream [B, T, D] that they are made of."""
Mix = tuple[float, float]  # alpha, temperature


class Distilled(NamedTuple):
    """Sums over tokens, float32 scalars; only `total` carries a gradient."""

    total: Array
    nll: Array
    kl: Array
    correct: Array


def chunked_distillation(
    logits_fns: tuple[LogitsFn, LogitsFn],
    student: Head,
    teacher: Head,
    targets: Array,
    weights: Array,
    *,
    chunk: int,
    alpha: float,
    temperature: float,
) -> Distilled:
    """Sums over all tokens, `chunk` tokens of each row at a time; `kl` is that at the temperature.

    `logits_fns`, of the student and of the teacher, give [..., V] of the weights and the stream
    of their head; targets int32 and weights float32 are [B, T].
    """
    (w, x), (frozen, y) = student, teacher
    x, y = constrain(x, "batch seq embed"), constrain(y, "batch seq embed")
    chunk, (x, y, targets, weights) = in_chunks(chunk, x, y, targets, weights)
    mix = (alpha, temperature)
    return _distilled(logits_fns, chunk, mix, w, x, frozen, y, targets, weights)


def _wide(fn: LogitsFn, w: Tree, x: Array) -> Array:
    return fn(w, x).astype(jnp.float32)


def _log_softmax(logits: Array, temperature: float) -> Array:
    return jax.nn.log_softmax(logits if temperature == 1 else logits / temperature, axis=-1)


def _sums(
    logits: Array, teacher: Array, targets: Array, weights: Array, mix: Mix
) -> tuple[Distilled, Array]:
    """Sums of float32 logits [..., V] of both, and d total / d logits."""
    alpha, temperature = mix
    log_p, log_q = (_log_softmax(a, temperature) for a in (teacher, logits))
    p = jnp.exp(log_p)
    kl = jnp.sum(jnp.sum(p * (log_p - log_q), axis=-1) * weights)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = jnp.sum((log_z - chosen) * weights)
    correct = jnp.sum((chosen >= jnp.max(logits, axis=-1)) * weights)
    total = (1 - alpha) * nll + alpha * temperature**2 * kl
    gradient = alpha * temperature * weights[..., None] * (jnp.exp(log_q) - p)
    if alpha < 1:
        gradient += (1 - alpha) * logits_gradient(logits, log_z, targets, weights, 0.0)
    return Distilled(total, nll, kl, correct), gradient


def _zeros() -> Distilled:
    return Distilled(*[jnp.zeros((), jnp.float32)] * 4)


def _pieces(chunk: int, arrays: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(token_chunks(a, chunk) for a in arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _distilled(
    fns: tuple[LogitsFn, LogitsFn], chunk: int, mix: Mix,
    w: Tree, x: Array, frozen: Tree, y: Array, targets: Array, weights: Array,
) -> Distilled:  # fmt: skip
    def body(sums: Distilled, piece: tuple[Array, ...]) -> tuple[Distilled, None]:
        xc, yc, tc, wc = piece
        new, _ = _sums(_wide(fns[0], w, xc), _wide(fns[1], frozen, yc), tc, wc, mix)
        return jax.tree.map(jnp.add, sums, new), None

    return jax.lax.scan(body, _zeros(), _pieces(chunk, (x, y, targets, weights)))[0]


def _forward(
    fns: tuple[LogitsFn, LogitsFn], chunk: int, mix: Mix,
    w: Tree, x: Array, frozen: Tree, y: Array, targets: Array, weights: Array,
) -> tuple[Distilled, tuple[Tree, ...]]:  # fmt: skip
    def body(carry: tuple[Distilled, Tree], piece: tuple[Array, ...]) -> tuple[Tree, Array]:
        sums, dw = carry
        xc, yc, tc, wc = piece
        logits, pull_back = jax.vjp(fns[0], w, xc)
        # behind barriers, or each of the products with the gradient computes it anew
        wide = jax.lax.optimization_barrier(logits.astype(jnp.float32))
        new, gradient = _sums(wide, _wide(fns[1], frozen, yc), tc, wc, mix)
        gradient = jax.lax.optimization_barrier(gradient.astype(logits.dtype))
        dwc, dxc = pull_back(gradient)
        dw = jax.tree.map(lambda a, b: a + b.astype(a.dtype), dw, dwc)
        return (jax.tree.map(jnp.add, sums, new), dw), dxc

    first = (_zeros(), jax.tree.map(jnp.zeros_like, w))
    (sums, dw), dx = jax.lax.scan(body, first, _pieces(chunk, (x, y, targets, weights)))
    return sums, (dw, join_chunks(dx), frozen, y, targets, weights)


def _backward(
    fns: object, chunk: int, mix: Mix, residuals: tuple[Tree, ...], cotangent: Distilled
) -> tuple[Tree, ...]:
    dw, dx, frozen, y, targets, weights = residuals
    g = cotangent.total  # the other sums are metrics
    scale = lambda a: (a * g).astype(a.dtype)  # noqa: E731
    none = partial(jax.tree.map, _no_gradient)
    return jax.tree.map(scale, dw), scale(dx), none(frozen), none(y), none(targets), none(weights)


def _no_gradient(a: Array) -> Array:
    inexact = jnp.issubdtype(a.dtype, jnp.inexact)
    return jnp.zeros(a.shape, a.dtype if inexact else jax.dtypes.float0)


_distilled.defvjp(_forward, _backward)
