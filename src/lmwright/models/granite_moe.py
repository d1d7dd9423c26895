"""Granite 3 with experts (https://huggingface.co/ibm-granite/granite-3.1-3b-a800m-base): Granite's
blocks, with experts in the place of the mlp, or beside one that every token takes; and the same
with windows, as in `granite_swa`."""

from typing import Annotated, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.models.decoder import Head
from lmwright.models.fused import fused_feed_forward, fused_mlp_spec
from lmwright.models.granite import Multiplied
from lmwright.models.granite_swa import TurnsByReach
from lmwright.models.layers import Attend
from lmwright.models.moe import AttentionBias, MoeDecoder
from lmwright.models.moe_by_reach import MoeByReach
from lmwright.nn.mlp import GatedMlp

Gate = Annotated[
    GatedMlp,
    Field(description="Gated feed-forward of the experts, and of the mlp beside them."),
]
Beside = Annotated[
    PositiveInt | None,
    Field(description="Width of an mlp beside the experts of every layer; none if unset."),
]


class GraniteExperts(Multiplied, MoeDecoder):
    """Granite's blocks with experts, and an mlp beside them where `mlp_dim` says its width."""

    mlp: GatedMlp

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of the experts, and of the mlp beside them."""
        beside = fused_mlp_spec(self, self.mlp_dim) if self.mlp_dim else {}
        return super().ffn_spec(kind) | beside

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D], and what the router did."""
        y, aux = super().ffn(kind, w, h, attend)
        if self.mlp_dim:
            y = y + fused_feed_forward(self.mlp, w, h, attend.mlp_chunk_tokens)
        return y, aux


@section
class GraniteMoe(GraniteExperts):
    """A decoder of the Granite 3 models with experts; its fields are the model."""

    kind: Literal["granite-moe"] = "granite-moe"
    mlp_dim: Beside = None  # type: ignore[assignment]
    norm_eps: Positive = 1e-6
    mlp: Gate = "swiglu"
    bias: AttentionBias = "none"


@section
class GraniteMoeSwa(TurnsByReach, GraniteExperts, MoeByReach):
    """Granite with windows and experts; its fields are the model."""

    kind: Literal["granite-moe-swa"] = "granite-moe-swa"
    mlp_dim: Beside = None  # type: ignore[assignment]
    norm_eps: Positive = 1e-6
    head: Head = "tied"
    mlp: Gate = "swiglu"
    bias: AttentionBias = "none"
