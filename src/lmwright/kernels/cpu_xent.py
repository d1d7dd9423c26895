"""Chunked cross-entropy for CPUs: chunks of few tokens, because fresh memory is slow there.

Each chunk's logits are pages that the kernel has to hand out and clear; each chunk also
reads and writes the whole gradient of the head. Both are small beside the matmuls at a few
times embed_dim tokens.
"""

from dataclasses import replace
from typing import Any

import jax
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.cpu import stands_left
from lmwright.core.stack import joint_gradients
from lmwright.nn import xent

TOKENS_PER_DIM = 4


def chunk_tokens(chunk: int, num_rows: int, embed_dim: int) -> int:
    """Tokens of each of `num_rows` rows whose logits exist at once: at most `chunk`."""
    return min(chunk, max(1, TOKENS_PER_DIM * embed_dim // num_rows))


def for_lanes(compute: Compute, num_rows: int, embed_dim: int) -> Compute:
    """Compute settings for a step that is mapped over lanes with `num_rows` rows in total: each
    lane sees only its own rows, but all of them share the memory."""
    chunk = chunk_tokens(compute.loss_chunk_tokens, num_rows, embed_dim)
    return replace(compute, loss_chunk_tokens=chunk)


def chunked_xent(
    logits_fn: xent.LogitsFn,
    w: Any,
    x: Array,
    targets: Array,
    weights: Array,
    *,
    chunk: int,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    sum_once: bool = False,
) -> xent.Xent:
    """Cross-entropy, as `nn.xent.chunked_xent`, with at most `chunk` tokens of each row of x [B, T,
    D] at once; for one device, which has nothing to add up."""
    b, _, d = x.shape
    chunk = chunk_tokens(chunk, b, d)

    def logits(w: Any, x: Array) -> Array:
        leaves, tree = jax.tree.flatten(w)
        x, *leaves = joint_gradients(x, *leaves)
        return logits_fn(jax.tree.unflatten(tree, leaves), x)

    tables = w.values() if isinstance(w, dict) else ()
    return xent.chunked_xent(
        logits, w, x, targets, weights, chunk=chunk, z_loss=z_loss, smoothing=smoothing,
        vocab_first=any(isinstance(table, Array) and stands_left(table) for table in tables),
    )  # fmt: skip
