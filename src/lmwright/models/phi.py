"""Phi-1, Phi-1.5 (https://arxiv.org/abs/2309.05463) and Phi-2: attention and an mlp without a gate
read the same layer norm, a part of each head is rotated, and everything has a bias, the head too.
"""

from typing import ClassVar, Literal

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.models import block
from lmwright.models.biased_head import BiasedHead, HeadBias
from lmwright.models.layer_normed import LayerNormed, Residual, RotaryFraction
from lmwright.nn.mlp import PlainMlp


@section
class Phi(BiasedHead, LayerNormed):
    """A decoder of the Phi-2 family; its fields are the model."""

    head_bias: ClassVar[HeadBias] = "all"  # type: ignore[misc]
    residual: ClassVar[Residual] = "parallel"  # type: ignore[misc]
    bias: ClassVar[block.Bias] = "all"  # type: ignore[misc]

    kind: Literal["phi"] = "phi"
    mlp_dim: PositiveInt
    mlp: PlainMlp = "gelu_tanh"
    """Activation of the feed-forward."""
    rotary_fraction: RotaryFraction = 0.5
    qk_norm: Literal["none", "head"] = "none"  # type: ignore[misc]
    """Layer norm of q and k over head_dim."""

    def mixer_spec(self, kind: str) -> Tree:
        """Weights of what joins tokens; all heads of queries share a norm, and those of keys."""
        names = ("q_norm", "k_norm") if self.qk_norm == "head" else ()
        ends = {"": 1.0, "_bias": 0.0}
        return block.attention_spec(self, self.bias) | {
            f"{name}{end}": Param("head_dim", (self.head_dim,), fill=fill)
            for name in names
            for end, fill in ends.items()
        }
