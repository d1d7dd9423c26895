"""Granite 4 (https://huggingface.co/ibm-granite/granite-4.0-h-tiny): blocks with Granite's
multipliers, of which most have Mamba-2 in the place of attention.

    x * embedding --+--> norm --> mamba or attention * residual --+-->
                    +---------------------------------------------^

    x --+--> norm --+--> mlp ---------+--> * residual --+-->
        |           +--> experts -----^                 |
        +-----------------------------------------------^

Gate and up of the mlp are one matrix, as LoRA's factors and released files have them. Where some
layers have Mamba-2, the others need no rotations.
"""

from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.errors import UserError
from lmwright.models.block import into_stream
from lmwright.models.by_reach import no_rotations
from lmwright.models.experts import Experts
from lmwright.models.fused import fused_feed_forward, fused_mlp_spec
from lmwright.models.granite import Multiplied
from lmwright.models.layers import Attend
from lmwright.models.mamba import Mamba
from lmwright.models.smollm3 import Rotation


@section
class HybridGranite(Multiplied, Mamba):
    """All of the family but the experts."""

    mlp: ClassVar[Literal["swiglu"]] = "swiglu"  # type: ignore[misc]

    mlp_dim: Annotated[PositiveInt, Field(description="Width of the mlp that every layer has.")]
    rotation: Rotation = "nope"
    """Whether attention rotates queries and keys."""
    bias: Literal["none", "attention"] = "none"
    """Whether the projections of attention add a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotation == "nope" and self.rope_scaling is not None:
            raise UserError(
                'model.rope_scaling: has no effect without rotations; set model.rotation = "rope", '
                "or leave it out"
            )

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, of no dimension if there are none."""
        if self.rotation == "rope":
            return super().tables(positions, length)
        return no_rotations(positions)

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of the mlp."""
        return fused_mlp_spec(self, self.mlp_dim)

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D]."""
        return fused_feed_forward("swiglu", w, h, attend.mlp_chunk_tokens), {}


@section
class Granite4(HybridGranite):
    """A decoder of the Granite 4 family; its fields are the model."""

    kind: Literal["granite4"] = "granite4"


@section
class Granite4Moe(HybridGranite):
    """Granite 4 with experts beside the mlp of every layer."""

    kind: Literal["granite4-moe"] = "granite4-moe"
    experts: Annotated[Experts, Field(description="Experts beside the mlp of the layers.")]

    @property
    def mixtures(self) -> dict[str, Experts]:
        """Experts of the layers, by prefix of their statistics."""
        return {"router": self.experts, **super().mixtures}

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of the mlp and of the experts."""
        experts = self.experts.spec("swiglu", self.embed_dim, into_stream(self))
        return super().ffn_spec(kind) | experts

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D], and what the router did."""
        y, _ = super().ffn(kind, w, h, attend)
        of_experts, aux = self.experts.run("swiglu", w, h, attend.real, attend.mlp_chunk_tokens)
        return y + of_experts, aux
