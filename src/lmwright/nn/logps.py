"""Log probabilities of given tokens, in chunks: [B, T, V] logits never exist as a whole.

    x [B, T, D] --split--> [B, C, D] --logits_fn--> [B, C, V] --> log p(target) [B, C]

The backward pass computes each chunk's logits again.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Tree


def token_logps(
    logits_fn: Callable[[Tree, Array], Array], w: Tree, x: Array, targets: Array, *, chunk: int
) -> Array:
    """float32 [B, T]: log probability of int `targets` [B, T] after hidden x [B, T, D];
    `logits_fn(w, x)` gives float32 [..., V]."""
    t = targets.shape[1]
    pieces = -(-t // min(chunk, t))
    size = -(-t // pieces)
    pad = pieces * size - t

    @partial(jax.checkpoint, prevent_cse=False)
    def some(x: Array, targets: Array) -> Array:
        logits = logits_fn(w, x)  # [B, C, V]
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    def cut(a: Array) -> Array:
        a = jnp.pad(a, [(0, pad) if i == 1 else (0, 0) for i in range(a.ndim)])
        return jnp.moveaxis(a.reshape(a.shape[0], pieces, size, *a.shape[2:]), 1, 0)

    logps = jax.lax.map(lambda piece: some(*piece), (cut(x), cut(targets)))  # [P, B, C]
    return jnp.moveaxis(logps, 0, 1).reshape(targets.shape[0], -1)[:, :t]


def segment_sums(values: Array, segment_ids: Array) -> Array:
    """float32 [B, T + 1]: sums of `values` [B, T] over the tokens of each segment id."""
    b, t = values.shape
    rows = jnp.arange(b)[:, None]
    return jnp.zeros((b, t + 1), jnp.float32).at[rows, segment_ids].add(values)
