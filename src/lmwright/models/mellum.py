"""Mellum 2 (https://arxiv.org/abs/2605.31268): the layers of Qwen 3 with experts, of which three in
four look through a window; where a longer context scales rotations, it is those of the others."""

from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.errors import UserError
from lmwright.models.by_reach import tables_by_reach
from lmwright.models.decoder import LayerReach, reaches
from lmwright.models.layers import Attend
from lmwright.models.moe import AttentionBias, DenseDim, DenseLayers, MoeDecoder

ALL_GLOBAL: tuple[LayerReach, ...] = ("global",)


@section
class Mellum(MoeDecoder):
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

    @property
    def reaches(self) -> tuple[LayerReach, ...]:
        """The reach of each layer."""
        return reaches(self.layer_pattern, self.num_layers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: its reach, and what its feed-forward is."""
        pairs = zip(self.reaches, super().kinds, strict=True)
        return tuple(f"{reach} {feed_forward}" for reach, feed_forward in pairs)

    def window_of(self, kind: str) -> int | None:
        """Tokens that queries of such a layer look at, themselves included; None for all."""
        return self.window if _reach(kind) == "local" else None

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer."""
        return tables_by_reach(self, self.local_rope_theta, positions, length)

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that attention adds to x [B, T, D]."""
        return super().mixed(kind, w, x, tables[_reach(kind)], attend)

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of the experts, or of a plain mlp."""
        return super().ffn_spec(_feed_forward(kind))

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D], and what the router did."""
        return super().ffn(_feed_forward(kind), w, h, attend)


def _reach(kind: str) -> str:
    return kind.split()[0]


def _feed_forward(kind: str) -> str:
    return kind.split()[1]
