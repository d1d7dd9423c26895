"""MiniMax-M2 (https://huggingface.co/MiniMaxAI/MiniMax-M2): many experts in every layer, sigmoid
routing balanced by a bias; norms of q and k over all heads together, a part of each head rotated.
"""

from typing import ClassVar, Literal

from lmwright.config.run import Positive, section
from lmwright.models.moe import MoeDecoder, RotaryFraction


@section
class MinimaxM2(MoeDecoder):
    """A decoder of the MiniMax-M2 models; its fields are the model."""

    qk_norm: ClassVar = "all"
    kind: Literal["minimax-m2"] = "minimax-m2"
    rotary_fraction: RotaryFraction = 0.5
    rope_theta: Positive = 5_000_000.0
    norm_eps: Positive = 1e-6

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)
