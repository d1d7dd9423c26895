"""K-EXAONE (https://arxiv.org/abs/2601.01739): the experts of DeepSeek-V3, norms of each head of
queries and keys, windows in three of four layers. Those rotate queries and keys, and the others do
not."""

from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Tree
from lmwright.models.by_reach import THREE_OF_FOUR, local_rotations
from lmwright.models.decoder import LayerReach
from lmwright.models.moe import DenseDim, DenseLayers
from lmwright.models.moe_by_reach import MoeByReach


@section
class ExaoneMoe(MoeByReach):
    """A decoder of the EXAONE models with experts; its fields are the model."""

    qk_norm: ClassVar = "head"
    kind: Literal["exaone-moe"] = "exaone-moe"
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    window: Annotated[
        PositiveInt, Field(description="Tokens that local layers look at, the query included.")
    ] = 128
    layer_pattern: tuple[LayerReach, ...] = THREE_OF_FOUR
    """Reach of each layer, of which local ones rotate; the pattern repeats over all layers."""

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer."""
        return local_rotations(self, positions, length)
