"""Command R (https://huggingface.co/CohereLabs/c4ai-command-r-v01) and what followed it: attention
and mlp read the same stream, after a layer norm without a bias; rotations turn neighboring dims of
a head. Command R7B, Command A (https://arxiv.org/abs/2504.00698) and Tiny Aya have windows in three
of four layers, and the others do not rotate.

    x --+--> norm --+--> attention --+--+-->
        |           +--> mlp --------+  |
        +-------------------------------^
"""

from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Tree
from lmwright.models.by_reach import LocalTurns
from lmwright.models.decoder import Head
from lmwright.models.glm4 import Neighbors
from lmwright.models.layer_normed import LayerNormed, Residual
from lmwright.models.layers import Attend, LayerResult
from lmwright.nn.mlp import GatedMlp


@section
class Cohere(LocalTurns, Neighbors, LayerNormed):
    """A decoder of the Command R family; its fields are the model."""

    norm_biases: ClassVar[bool] = False
    residual: ClassVar[Residual] = "parallel"  # type: ignore[misc]

    kind: Literal["cohere"] = "cohere"
    mlp_dim: PositiveInt
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""
    head: Head = "tied"
    logits_multiplier: Positive = 0.0625
    """Factor on logits."""
    qk_norm: Literal["none", "head"] = "none"  # type: ignore[misc]
    """Layer norm of each head of q and k, with weights of its own."""
    bias: Literal["none", "attention"] = "none"
    """Projections that add a bias."""

    def layer(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> LayerResult:
        """x [B, T, D] after attention and mlp."""
        return super().layer(kind, w, x, tables[kind], attend)

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        return super().logits(w, hidden) * self.logits_multiplier
