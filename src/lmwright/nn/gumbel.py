"""Samples of a softmax by Gumbel noise (https://arxiv.org/abs/1411.0030), the vocabulary in chunks.

    argmax over v of logit[v] + gumbel[v]    is distributed as softmax(logit)

Each chunk of the vocabulary keeps the best of what it and those before it have, so that all logits
of a token never exist at once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.param import Tree


def sample(
    logits_fn: Callable[[Tree, Array], Array], w: Tree, axes: Tree, x: Array, keys: Array,
    vocab_size: int, chunk: int,
) -> Array:  # fmt: skip
    """int32 [B, K]: for each place of x [B, K, D] an id by the softmax of its logits.

    `logits_fn(w, x)` gives [B, K, V]; `axes` says along which axis a leaf of `w` has the
    vocabulary, -1 if along none. `keys` [B] are those of rows. No gradient is defined.
    """
    chunk = min(chunk, vocab_size)
    w, x = lax.stop_gradient((w, x))

    def body(best: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], None]:
        first = number * chunk
        start = jnp.minimum(first, vocab_size - chunk)  # the last one goes over some again
        cut = lambda a, axis: a if axis < 0 else lax.dynamic_slice_in_dim(a, start, chunk, axis)  # noqa: E731
        logits = logits_fn(jax.tree.map(cut, w, axes), x).astype(jnp.float32)
        draw = lambda key: jax.random.gumbel(jax.random.fold_in(key, number), logits.shape[1:])  # noqa: E731
        ids = start + lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        scores = jnp.where(ids < first, -jnp.inf, logits + jax.vmap(draw)(keys))
        top, at = jnp.max(scores, axis=-1), start + jnp.argmax(scores, axis=-1).astype(jnp.int32)
        better = top > best[0]
        return (jnp.where(better, top, best[0]), jnp.where(better, at, best[1])), None

    shape = x.shape[:2]
    nothing = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    return lax.scan(body, nothing, jnp.arange(-(-vocab_size // chunk)))[0][1]
