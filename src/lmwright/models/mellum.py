"""Mellum 2 (https://arxiv.org/abs/2605.31268): the layers of Qwen 3 with experts, of which three in
four look through a window; where a longer context scales rotations, it is those of the others."""

from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.models.by_reach import tables_by_reach
from lmwright.models.decoder import LayerReach
from lmwright.models.moe import AttentionBias, DenseDim, DenseLayers
from lmwright.models.moe_by_reach import MoeByReach

ALL_GLOBAL: tuple[LayerReach, ...] = ("global",)


@section
class Mellum(MoeByReach):
    """A decoder of the Mellum 2 family; its fields are the model."""

    qk_norm: ClassVar = "head"
    kind: Literal["mellum"] = "mellum"
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    window: Annotated[
        PositiveInt | None,
        Field(description="Tokens that local layers look at, the query included."),
    ] = 1024
    layer_pattern: tuple[LayerReach, ...] = ("local", "local", "local", "global")
    """Reach of each layer; the pattern repeats over all layers."""
    rope_theta: Positive = 500_000.0
    local_rope_theta: Positive | None = None
    """Theta of local layers, which are then not scaled; that of all layers if unset."""
    norm_eps: Positive = 1e-6
    bias: AttentionBias = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None and self.layer_pattern != ALL_GLOBAL:
            raise UserError(
                'model.layer_pattern: has no effect without model.window; write ["global"], or '
                "give the window too"
            )

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer."""
        return tables_by_reach(self, self.local_rope_theta, positions, length)
