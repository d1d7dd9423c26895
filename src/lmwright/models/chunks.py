"""Decoders of which some layers attend in chunks (`nn.chunks`)."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Attention, Batch, Work, seen_keys
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.kernels import select
from lmwright.models.decoder import Decoder


@dataclass(frozen=True)
class OfChunks(Attention):
    """Attention whose windows are chunks."""

    def keys(self, seq_len: int) -> float:
        """Keys that a query sees, summed over layers."""
        return sum(seen_keys(None, min(chunk or seq_len, seq_len)) for chunk in self.windows)


class Chunked(Decoder):
    """A decoder whose layers with a window attend in chunks of so many tokens. Its layers say so by
    `nn.chunks.InChunks`."""

    attention: ClassVar[str] = "attention in chunks"

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """Residual stream after the last norm, [B, T, D]."""
        return self.hidden_by(select.KERNELS[self.attention](compute), w, batch, compute)

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`."""
        return _work(self, seq_len)


@lru_cache(256)
def _work(model: Chunked, seq_len: int) -> Work:
    work: Work = Decoder.work(model, seq_len)
    of: Any = work.attention
    return replace(work, attention=OfChunks(of.windows, of.num_heads, of.num_kv_heads, of.head_dim))
