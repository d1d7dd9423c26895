"""Llama-like decoders whose feed-forward is a mixture of experts. They differ in their norms of
queries and keys, in what is plain among their layers, and in defaults.

    x --+--> norm --> attention --+--> norm --> experts, or a plain mlp --+-->
        +-------------------------^ +-------------------------------------^
"""

from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import NonNegativeInt, Positive, PositiveInt, section
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.errors import UserError
from lmwright.models.block import into_stream
from lmwright.models.experts import Experts
from lmwright.models.layers import Attend
from lmwright.models.limited import QkvLimit, limited
from lmwright.models.llama import PreNorm
from lmwright.nn.mlp import GatedMlp

DENSE, MOE = "dense", "moe"

Window = Annotated[
    PositiveInt | None, Field(description="Tokens that every layer looks at, the query included.")
]
AttentionBias = Annotated[
    Literal["none", "attention"],
    Field(description="Whether the projections of attention add a bias."),
]
DenseLayers = Annotated[
    tuple[NonNegativeInt, ...], Field(description="Numbers of the layers that have a plain mlp.")
]
DenseDim = Annotated[PositiveInt, Field(description="Width of the plain mlp of `dense_layers`.")]
RotaryFraction = Annotated[
    float,
    Field(gt=0, le=1, description="Share of each head that is rotated, from its first dim on."),
]


class Constants(PreNorm):
    """Values of fields that only some families have."""

    dense_layers: tuple[int, ...] = ()
    window: int | None = None


@section
class MoeDecoder(Constants):
    """Fields of every decoder with experts, in all layers but `dense_layers`."""

    experts: Annotated[Experts, Field(description="Feed-forward of the layers.")]
    mlp: Annotated[
        GatedMlp, Field(description="Gated feed-forward of the experts, and of plain layers.")
    ] = "swiglu"

    def __post_init__(self) -> None:
        super().__post_init__()
        dense = self.dense_layers
        if list(dense) != sorted(set(dense)) or any(not 0 <= i < self.num_layers for i in dense):
            raise UserError(
                f"model.dense_layers: {list(dense)} must be numbers of layers from 0 to "
                f"{self.num_layers - 1}, in order, none twice"
            )
        if len(dense) == self.num_layers:
            raise UserError("model.dense_layers: names every layer; use a model without experts")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: with experts, or with a plain mlp."""
        return tuple(DENSE if i in self.dense_layers else MOE for i in range(self.num_layers))

    def window_of(self, kind: str) -> int | None:
        """The window, which all layers have."""
        return self.window

    @property
    def mixtures(self) -> dict[str, Experts]:
        """Experts of the layers, by prefix of their statistics."""
        return {"router": self.experts, **super().mixtures}

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of the experts, or of a plain mlp."""
        if kind == DENSE:
            return super().ffn_spec(kind)
        return self.experts.spec(self.mlp, self.embed_dim, into_stream(self))

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D], and what the router did."""
        if kind == DENSE:
            return super().ffn(kind, w, h, attend)
        return self.experts.run(self.mlp, w, h, attend.real, attend.mlp_chunk_tokens)


@section
class Mixtral(MoeDecoder):
    """Mixtral (https://arxiv.org/abs/2401.04088): experts in every layer, the best two by softmax,
    routing weights normalized over them; attention as in Mistral."""

    kind: Literal["mixtral"] = "mixtral"
    rope_theta: Positive = 1_000_000.0
    window: Window = None


@section
class Qwen3Moe(MoeDecoder):
    """Qwen 3 with experts (https://arxiv.org/abs/2505.09388): norms of q and k in each head, some
    layers plain."""

    qk_norm: ClassVar = "head"
    kind: Literal["qwen3-moe"] = "qwen3-moe"
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    rope_theta: Positive = 1_000_000.0
    window: Window = None
    norm_eps: Positive = 1e-6
    bias: AttentionBias = "none"


@section
class Olmoe(MoeDecoder):
    """OLMoE (https://arxiv.org/abs/2409.02060): many small experts in every layer, routing weights
    as the softmax leaves them; norms of q and k over all heads together."""

    qk_norm: ClassVar = "all"
    kind: Literal["olmoe"] = "olmoe"
    bias: AttentionBias = "none"
    qkv_limit: QkvLimit = None

    def normed(self, w: Tree, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values after their norms, within the limit."""
        return limited(self.qkv_limit, *super().normed(w, q, k, v))


@section
class Dots1(MoeDecoder):
    """dots.llm1 (https://arxiv.org/abs/2506.05767): the layers of DeepSeek-V3
    (https://arxiv.org/abs/2412.19437) but for its attention. Sigmoid routing from the best groups,
    balanced by a bias; shared experts for every token; the first layers plain."""

    qk_norm: ClassVar = "head"
    kind: Literal["dots1"] = "dots1"
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    norm_eps: Positive = 1e-6
    bias: AttentionBias = "none"


@section
class Glm4Moe(MoeDecoder):
    """GLM-4.5 (https://arxiv.org/abs/2508.06471): the layers of dots.llm1, a part of each head
    rotated."""

    kind: Literal["glm4-moe"] = "glm4-moe"
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    rotary_fraction: RotaryFraction = 0.5
    rope_theta: Positive = 1_000_000.0
    qk_norm: Literal["none", "head"] = "none"  # type: ignore[misc]
    """RMS norm of q and k over head_dim."""
    bias: Literal["none", "qkv"] = "none"
    """Projections that add a bias."""

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)
