"""Cross-entropy in chunks: [B, T, V] logits never exist as a whole.

The forward pass takes each chunk's gradient at once, so logits are computed a single time:

    x [B, T, D] --split--> [B, C, D] --logits_fn--> [B, C, V] --> loss, dx, dw
                                                                  (kept for the backward pass)

z-loss as in PaLM (https://arxiv.org/abs/2204.02311): z * log(Z)^2. Label smoothing as in
https://arxiv.org/abs/1512.00567: a share of each target is spread over the vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.config.registry import Registry
from lmwright.core.leaves import is_typed
from lmwright.core.param import Tree
from lmwright.core.sharding import (
    TokenShards,
    by_platform,
    constrain,
    context_ways,
    join_chunks,
    platform,
    token_chunks,
)

LogitsFn = Callable[[Tree, Array], Array]
OneChunk = Callable[[tuple[Array, Array, Array]], tuple["Xent", Tree, Array]]
"""Sums of a chunk, its gradient of the weights, and that of its inputs."""
Extra = tuple[float, float, int]  # z_loss, smoothing, axis of the vocabulary

APART = Registry(__package__, {"chunks": "xent_apart.one_by_one"})
MOST_APART = 4  # chunks


class Xent(NamedTuple):
    """Sums over tokens, float32 scalars; only `total` carries a gradient."""

    total: Array
    nll: Array
    z: Array
    correct: Array


def at_targets(logits: Array, targets: Array, axis: int = -1) -> Array:
    """bool [..., V]: where a logit is that of its token's target. The vocabulary lies along
    `axis`."""
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, axis % logits.ndim)
    return ids == jnp.expand_dims(targets, axis)


def _gathered(axis: int, logits: Array, targets: Array) -> tuple[Array, Array]:
    """The logits of the targets, and the largest of each token."""
    chosen = jnp.take_along_axis(logits, jnp.expand_dims(targets, axis), axis=axis)
    return jnp.squeeze(chosen, axis), jnp.max(logits, axis=axis)


def _in_one_pass(axis: int, logits: Array, targets: Array) -> tuple[Array, Array]:
    """`_gathered` in one pass: TPUs take twice as long for a maximum alone, and gather from all."""
    here = at_targets(logits, targets, axis)
    chosen = jnp.sum(jnp.where(here, logits, 0), axis=axis)
    others = jnp.max(jnp.where(here, -jnp.inf, logits), axis=axis)
    return chosen, jnp.maximum(chosen, others)


def _then_sums(
    first: Callable[..., tuple[Array, Array]], axis: int, logits: Array, targets: Array
) -> tuple[Array, Array, Array]:
    """`first`, and log Z of each token by another pass."""
    chosen, top = first(axis, logits, targets)
    exponentials = jnp.exp(logits - jnp.expand_dims(top, axis))
    return chosen, top, top + jnp.log(jnp.sum(exponentials, axis=axis))


def _in_pairs(axis: int, logits: Array, targets: Array) -> tuple[Array, Array, Array]:
    """`_then_sums` in one pass, for GPUs, which wait for memory: parts of a row are joined with
    their maxima (https://arxiv.org/abs/1805.02867)."""
    chosen = jnp.sum(jnp.where(at_targets(logits, targets, axis), logits, 0), axis=axis)
    none = jnp.finfo(jnp.float32).min, jnp.float32(0)
    parts = logits, jnp.ones_like(logits)
    top, total = lax.reduce(parts, none, _joined, (axis % logits.ndim,))
    return chosen, top, top + jnp.log(total)


def _joined(part: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    (top, total), (tops, more) = part, other
    less = jnp.exp(-jnp.abs(top - tops))
    both = jnp.where(top >= tops, total + more * less, total * less + more)
    return jnp.maximum(top, tops), both


def _sums(
    logits: Array, targets: Array, weights: Array, z_loss: float, smoothing: float, axis: int = -1
) -> tuple[Xent, Array]:
    """Sums for float32 logits with the vocabulary along `axis`, int targets and float32 weights,
    and log Z of each token. A target counts as correct where no logit is larger; `nll` is that of
    the targets alone, whatever the `smoothing`."""
    cpu, default = (partial(_then_sums, first, axis) for first in (_gathered, _in_one_pass))
    gpu = partial(_in_pairs, axis)
    chosen, top, log_z = by_platform(logits, targets, cpu=cpu, gpu=gpu, default=default)
    nll = jnp.sum((log_z - chosen) * weights)
    z = jnp.sum(jnp.square(log_z) * weights)
    correct = jnp.sum((chosen >= top) * weights)
    total = nll + z_loss * z
    if smoothing:
        total += smoothing * jnp.sum((chosen - jnp.mean(logits, axis=axis)) * weights)
    return Xent(total, nll, z, correct), log_z


def logits_gradient(
    logits: Array, log_z: Array, targets: Array, weights: Array, z_loss: float,
    smoothing: float = 0.0, axis: int = -1,
) -> Array:  # fmt: skip
    """d total / d logits, float32 [..., V]: one elementwise pass, nothing scattered. The
    vocabulary lies along `axis`."""
    expand = partial(jnp.expand_dims, axis=axis)
    probs = jnp.exp(logits - expand(log_z))
    pull = weights * (1.0 + 2.0 * z_loss * log_z)
    spread, chosen = 0.0, expand(weights)
    if smoothing:
        spread = chosen * (smoothing / logits.shape[axis])
        chosen = chosen * (1.0 - smoothing) + spread
    return probs * expand(pull) - jnp.where(at_targets(logits, targets, axis), chosen, spread)


def chunked_xent(
    logits_fn: LogitsFn, w: Tree, x: Array, targets: Array, weights: Array, *, chunk: int,
    z_loss: float = 0.0, smoothing: float = 0.0, vocab_first: bool = False, sum_once: bool = False,
) -> Xent:  # fmt: skip
    """Sums over all tokens of x [B, T, D], on each device `chunk` tokens of each row at a time.

    `logits_fn(w, x)` gives [..., V]; targets int32 and weights float32 are [B, T].
    `vocab_first`: how a chunk's logits should lie in memory; the values are the same. `sum_once`:
    devices add up the gradient of `w` once, not for each chunk.
    """
    x = constrain(x, "batch seq embed")
    chunk, (x, targets, weights) = in_chunks(chunk, x, targets, weights)
    extra = (z_loss, smoothing, 0 if vocab_first else -1)
    return _xent(logits_fn, chunk, extra, sum_once, w, x, targets, weights)


def in_chunks(chunk: int, *arrays: Array) -> tuple[int, tuple[Array, ...]]:
    """(tokens of a chunk, arrays [B, T, ...] filled up with zeros to whole chunks), for `chunk`
    tokens of a row on each device: so many for each piece where `context` cuts the rows."""
    ways = context_ways()
    local = -(-arrays[0].shape[1] // ways)  # as many of each, of any number of masked tokens
    chunk = min(chunk, local)
    size = -(-local // chunk) * chunk
    return chunk * ways, tuple(_padded(a, ways, size) for a in arrays)


def _padded(a: Array, ways: int, size: int) -> Array:
    """[B, T, ...] with each of its pieces along T filled up with zeros to `size`."""
    if missing := -a.shape[1] % ways:
        a = jnp.pad(a, [(0, missing) if i == 1 else (0, 0) for i in range(a.ndim)])
    local = a.shape[1] // ways
    if local == size:
        return a
    pieces = a.reshape(a.shape[0], ways, local, *a.shape[2:])
    pieces = jnp.pad(pieces, [(0, size - local) if i == 2 else (0, 0) for i in range(pieces.ndim)])
    return pieces.reshape(a.shape[0], ways * size, *a.shape[2:])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _xent(
    logits_fn: LogitsFn, chunk: int, extra: Extra, sum_once: bool,
    w: Tree, x: Array, targets: Array, weights: Array,
) -> Xent:  # fmt: skip
    def body(sums: Xent, piece: tuple[Array, Array, Array]) -> tuple[Xent, None]:
        xc, tc, wc = piece
        wide = jnp.moveaxis(logits_fn(w, xc).astype(jnp.float32), -1, extra[-1])
        return jax.tree.map(jnp.add, sums, _sums(wide, tc, wc, *extra)[0]), None

    pieces = tuple(token_chunks(a, chunk) for a in (x, targets, weights))
    return lax.scan(body, Xent(*[jnp.zeros((), jnp.float32)] * 4), pieces)[0]


def _xent_fwd(
    logits_fn: LogitsFn, chunk: int, extra: Extra, sum_once: bool,
    w: Tree, x: Array, targets: Array, weights: Array,
) -> tuple[Xent, tuple[Tree, Array, Array, Array]]:  # fmt: skip
    axis = extra[-1]
    plain = not any(map(is_typed, jax.tree.leaves(w, is_leaf=is_typed)))
    shards = TokenShards.of(x) if plain and sum_once else TokenShards()
    pieces = tuple(token_chunks(a, chunk) for a in (x, targets, weights))
    # a loop would pass over the weights' gradient once more for each
    apart = platform() == "gpu" and plain and len(pieces[0]) <= MOST_APART
    cast = shards.count > 1 or apart
    narrow = lambda a: a.astype(x.dtype) if a.ndim > 1 else a  # noqa: E731  # biases stay wide
    read = jax.tree.map(lambda a: shards.repeat(narrow(a)), w) if cast else w

    def one(piece: tuple[Array, Array, Array]) -> tuple[Xent, Tree, Array]:
        xc, tc, wc = (shards.split(a) for a in piece)
        logits, pull_back = shards.vjp(logits_fn, read, xc)
        wide = jnp.moveaxis(logits.astype(jnp.float32), -1, axis)
        wide = lax.optimization_barrier(wide)
        new, log_z = _sums(wide, tc, wc, *extra)
        dlogits = logits_gradient(wide, log_z, tc, wc, *extra)
        if x.dtype == logits.dtype or not plain:  # otherwise the product does it, in few bytes
            # behind a barrier, or each of the two products computes it anew
            dlogits = lax.optimization_barrier(dlogits)
        dwc, dxc = pull_back(jnp.moveaxis(dlogits, axis, -1))
        return new, dwc, shards.join(dxc)

    sums, dw, dx = APART["chunks"](one, w, pieces) if apart else _in_a_loop(one, shards, w, pieces)
    dw = jax.tree.map(shards.total, dw)
    return sums, (dw, join_chunks(dx), targets, weights)


def _in_a_loop(
    one: OneChunk, shards: TokenShards, w: Tree, pieces: tuple[Array, ...]
) -> tuple[Xent, Tree, Array]:
    """Sums over chunks, that of the gradients in the weights' own precision, and dx [C, ...]."""

    def body(carry: tuple[Xent, Tree], piece: tuple[Array, Array, Array]):
        new, dwc, dxc = one(piece)
        dw = jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry[1], dwc)
        return (jax.tree.map(jnp.add, carry[0], new), dw), dxc

    dw = jax.tree.map(lambda a: shards.repeat(jnp.zeros_like(a)), w)
    (sums, dw), dx = lax.scan(body, (Xent(*[jnp.zeros((), jnp.float32)] * 4), dw), pieces)
    return sums, dw, dx


def _xent_bwd(logits_fn, chunk, extra, sum_once, residuals, cotangent: Xent):
    dw, dx, targets, weights = residuals
    g = cotangent.total  # the other sums are metrics
    scale = lambda a: (a * g).astype(a.dtype)  # noqa: E731
    return (
        jax.tree.map(scale, dw),
        scale(dx),
        jnp.zeros(targets.shape, jax.dtypes.float0),
        jnp.zeros_like(weights),
    )


_xent.defvjp(_xent_fwd, _xent_bwd)
