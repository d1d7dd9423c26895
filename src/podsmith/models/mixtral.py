"""Mixtral (https://arxiv.org/abs/2401.04088): experts in every layer, the best two by softmax,
shares normalized over them; attention as in Mistral."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from podsmith.core.param import Tree
from podsmith.core.stack import Aux
from podsmith.models.decoder import Attend, Decoder
from podsmith.models.experts import Experts
from podsmith.models.moe_block import check_moe, moe_kinds, moe_layer, moe_spec
from podsmith.models.moe_hf import MixtralHf
from podsmith.nn.mlp import GatedMlp
from podsmith.nn.rope_scaling import RopeScaling
from podsmith.run import STRICT, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Mixtral(Decoder):
    """A decoder of the mixtral family; its fields are the model."""

    __pydantic_config__ = STRICT
    kind: Literal["mixtral"] = "mixtral"
    vocab_size: PositiveInt
    embed_dim: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    seq_len: PositiveInt
    """Context length the model is built for, in tokens."""
    experts: Experts
    rope_theta: Annotated[float, Field(gt=0)] = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    """How rotations change for a longer context."""
    window: PositiveInt | None = None
    """Tokens that every layer looks at, the query included."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    mlp: GatedMlp = "swiglu"
    """Gated feed-forward of the experts."""
    head: Literal["tied", "untied"] = "untied"
    """Whether the output head is the embedding table."""
    embed_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of fresh embeddings."""

    hf: ClassVar[MixtralHf] = MixtralHf()

    def __post_init__(self) -> None:
        check_moe(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return moe_kinds(self.num_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that the queries of each layer look at; None for all."""
        return (self.window,) * self.num_layers

    def spec(self) -> Tree:
        """Every weight, once."""
        return moe_spec(self)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: tuple[Array, Array], attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and experts."""
        return moe_layer(self, kind, w, x, tables, attend, window=self.window)
