"""AFMoE, the Trinity models (https://arxiv.org/abs/2602.17004): windows in three of four layers,
which rotate queries and keys, while the others do not; attention with a gate, norms before and
behind each branch, DeepSeek-V3's experts.

    q, k, v --> norms of q and k --> attention --> times sigmoid(gate of the input) --> o
"""

from typing import Annotated, ClassVar, Literal

import jax
from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.weight import dot, name_result
from lmwright.models.block import output, project
from lmwright.models.by_reach import THREE_OF_FOUR, local_rotations, reach_in
from lmwright.models.decoder import LayerReach
from lmwright.models.gemma import times_root
from lmwright.models.layers import Attend
from lmwright.models.moe import AttentionBias, DenseDim, DenseLayers
from lmwright.models.moe_by_reach import MoeByReach
from lmwright.models.out_norms import OutNorms
from lmwright.nn.attention import Scoring


@section
class Afmoe(OutNorms, MoeByReach):
    """A decoder of the Trinity models; its fields are the model."""

    qk_norm: ClassVar = "head"
    normed_branches: ClassVar = ("o", "down")
    kind: Literal["afmoe"] = "afmoe"
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    window: Annotated[
        PositiveInt, Field(description="Tokens that local layers look at, the query included.")
    ] = 1024
    layer_pattern: tuple[LayerReach, ...] = THREE_OF_FOUR
    """Reach of each layer, of which local ones rotate; the pattern repeats over all layers."""
    embedding_scale: Literal["none", "root"] = "none"
    """Factor on embeddings: none, or the root of their width."""
    bias: AttentionBias = "none"

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        x = super().embedded(w, tokens, compute)
        return times_root(x) if self.embedding_scale == "root" else x

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer."""
        return local_rotations(self, positions, length)

    def mixer_spec(self, kind: str) -> Tree:
        """Weights of attention and its gate."""
        gate = Param("embed -> heads head_dim", (self.embed_dim, self.num_heads, self.head_dim))
        return super().mixer_spec(kind) | {"attention_gate": gate}

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that attention adds to x [B, T, D]."""
        h = self.attention_input(w, x)
        q, k, v = self.normed(w, *project(w, h))
        gate = constrain(dot("btd,dnh->btnh", h, w["attention_gate"]), "batch seq heads head_dim")
        q, k = map(name_result, self.rotated(q, k, tables[reach_in(kind)]))
        a = attend(q, k, v, Scoring(self.score_scale, self.window_of(kind)))
        return self.out_normed(w, "attention_out_norm", output(w, a * jax.nn.sigmoid(gate)))
