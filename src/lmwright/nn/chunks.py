"""Causal attention in chunks, as Llama 4 has it: a segment is cut from its beginning into chunks of
so many tokens, and a query sees its own chunk alone. To kernels of attention a chunk is a segment.

    segments   1 1 1 1 1 1 1 2 2 2 2 2 0 0      chunks of 3   | | |   | | |   |   | | |   | |
"""

import jax.numpy as jnp
from jax import Array

from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import own_block


class InChunks(Scoring):
    """Scoring for queries that see their own chunk, of `window` tokens, alone."""


def chunk_ids(segment_ids: Array, size: int) -> Array:
    """int32 [B, T]: ids of chunks of `size` tokens, of segments [B, T]; 0 at padding."""
    return jnp.where(segment_ids > 0, own_block(segment_ids, size).start + 1, 0)


def seen_in_chunk(positions: Array, size: int) -> Array:
    """int [B, T]: tokens of its chunk that a query at positions [B, T] sees, itself included."""
    return positions % size + 1
