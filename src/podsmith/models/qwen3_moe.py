"""Qwen 3 with experts (https://arxiv.org/abs/2505.09388): norms of q and k in each head, some
layers plain."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from podsmith.core.param import Param, Tree
from podsmith.core.stack import Aux
from podsmith.models.decoder import Attend, Decoder
from podsmith.models.experts import Experts
from podsmith.models.moe_block import check_moe, moe_kinds, moe_layer, moe_spec
from podsmith.models.moe_hf import Qwen3MoeHf
from podsmith.nn.mlp import GatedMlp
from podsmith.nn.norm import rms_norm
from podsmith.nn.rope_scaling import RopeScaling
from podsmith.run import STRICT, NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Decoder):
    """A decoder of the qwen3-moe family; its fields are the model."""

    __pydantic_config__ = STRICT
    kind: Literal["qwen3-moe"] = "qwen3-moe"
    vocab_size: PositiveInt
    embed_dim: PositiveInt
    mlp_dim: PositiveInt
    """Width of the plain mlp of `dense_layers`."""
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    seq_len: PositiveInt
    """Context length the model is built for, in tokens."""
    experts: Experts
    dense_layers: tuple[NonNegativeInt, ...] = ()
    """Numbers of the layers that have a plain mlp."""
    rope_theta: Annotated[float, Field(gt=0)] = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    """How rotations change for a longer context."""
    window: PositiveInt | None = None
    """Tokens that every layer looks at, the query included."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    mlp: GatedMlp = "swiglu"
    """Gated feed-forward of the experts and of the plain layers."""
    head: Literal["tied", "untied"] = "untied"
    """Whether the output head is the embedding table."""
    bias: Literal["none", "attention"] = "none"
    """Whether the projections of attention add a bias."""
    embed_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of fresh embeddings."""

    hf: ClassVar[Qwen3MoeHf] = Qwen3MoeHf()

    def __post_init__(self) -> None:
        check_moe(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return moe_kinds(self.num_layers, self.dense_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that the queries of each layer look at; None for all."""
        return (self.window,) * self.num_layers

    def spec(self) -> Tree:
        """Every weight, once."""
        norm = Param("head_dim", (self.head_dim,), fill=1.0)
        return moe_spec(self, self.bias, {"q_norm": norm, "k_norm": norm})

    def layer(
        self, kind: str, w: Tree, x: Array, tables: tuple[Array, Array], attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and experts."""

        def normed(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
            q = rms_norm(q, w["q_norm"], self.norm_eps)
            return q, rms_norm(k, w["k_norm"], self.norm_eps), v

        return moe_layer(self, kind, w, x, tables, attend, normed, self.window)
