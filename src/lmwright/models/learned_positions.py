"""Learned vectors of positions, which are added to the embeddings; no layer rotates.

tokens --embed--+
positions ------+--> blocks
"""

from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from jax import Array

from lmwright.config.run import section
from lmwright.core.contract import Work
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.weight import lookup
from lmwright.models.decoder import Decoder


@section
class LearnedPositions(Decoder):
    """A decoder with learned vectors of positions."""

    rope_theta: ClassVar[None] = None  # type: ignore[misc, assignment]
    rope_scaling: ClassVar[None] = None  # type: ignore[misc]
    first_row: ClassVar[int] = 0  # the row of a text's first token

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return 0

    def spec(self) -> Tree:
        """Every weight, once."""
        shape = (self.first_row + self.seq_len, self.embed_dim)
        return super().spec() | {
            "positions": Param("distances -> embed", shape, std=self.embed_std)
        }

    def placed(self, w: Tree, x: Array, positions: Array) -> Array:
        """The residual stream x [B, T, D] with the learned vectors of positions [B, T]."""
        rows = positions + self.first_row if self.first_row else positions
        return constrain(x + lookup(w["positions"], rows, x.dtype), "batch stream embed")

    def tables(self, positions: Array, length: int) -> Tree:
        """Nothing: no layer rotates."""
        return ()

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`; positions are only looked up."""
        return _work(self, seq_len)


@lru_cache(256)
def _work(model: LearnedPositions, seq_len: int) -> Work:
    of = Decoder.work(model, seq_len)
    return replace(of, active={**of.active, "positions": 0.0})
