"""Causal attention, of some layers in chunks (`nn.chunks`), by the kernels of each platform."""

from collections.abc import Callable
from dataclasses import replace

from jax import Array

from lmwright.core.compute import Compute
from lmwright.kernels import select
from lmwright.nn.attention import Scoring
from lmwright.nn.chunks import InChunks, chunk_ids


def attend_by(compute: Compute) -> Callable[..., Array]:
    """`attend(q, k, v, segment_ids, scoring)`: as `nn.attention.causal_attention`, in chunks where
    the scoring is `InChunks`."""
    whole = select.causal_attention(compute)
    # of a row that is one document, chunks are several
    in_chunks = select.causal_attention(replace(compute, one_document=False))

    def run(q: Array, k: Array, v: Array, ids: Array, scoring: Scoring) -> Array:
        if not isinstance(scoring, InChunks):
            return whole(q, k, v, ids, scoring)
        size, plain = scoring.window, Scoring(*scoring)
        if size is None or size >= ids.shape[1]:
            return whole(q, k, v, ids, plain._replace(window=None))
        return in_chunks(q, k, v, chunk_ids(ids, size), plain)

    return run
