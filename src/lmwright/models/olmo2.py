"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms behind the branches instead of before them,
and norms of q and k over all heads together.

    x --+--> attention --> norm --+--> mlp --> norm --+-->
        +-------------------------^ +-----------------^
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import STRICT, PositiveInt
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import kept
from lmwright.models.block import (
    attention_spec,
    embedding_spec,
    feed_forward,
    mlp_spec,
    output,
    project,
)
from lmwright.models.decoder import Attend, Decoder, check_decoder, layers_spec
from lmwright.nn.mlp import Mlp
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import apply_rope
from lmwright.nn.rope_scaling import RopeScaling

Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Olmo2(Decoder):
    """A decoder of the OLMo 2 family; its fields are the model."""

    __pydantic_config__ = STRICT
    kind: Literal["olmo2"] = "olmo2"
    vocab_size: PositiveInt
    embed_dim: PositiveInt
    mlp_dim: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    seq_len: PositiveInt
    """Context length the model is built for, in tokens."""
    rope_theta: Positive = 500_000.0
    rope_scaling: RopeScaling | None = None
    """How rotations change for a longer context."""
    norm_eps: Positive = 1e-6
    mlp: Mlp = "swiglu"
    """Gated (swiglu, geglu with tanh, reglu) or plain (relu, relu2) feed-forward."""
    head: Literal["tied", "untied"] = "untied"
    """Whether the output head is the embedding table."""
    bias: Literal["none", "attention"] = "none"
    """Which projections add a bias."""
    embed_std: Positive = 0.02
    """Standard deviation of fresh embeddings."""

    def __post_init__(self) -> None:
        check_decoder(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every layer looks at the whole row."""
        return ("global",) * self.num_layers

    def spec(self) -> Tree:
        """Every weight, once."""
        return {
            **embedding_spec(self),
            **layers_spec(self.spans, lambda kind: self._layer_spec()),
            "norm": Param("norm", (self.embed_dim,), fill=1.0),
        }

    def _layer_spec(self) -> Tree:
        n, k, h = self.num_heads, self.num_kv_heads, self.head_dim
        return {
            **attention_spec(self, self.bias),
            **mlp_spec(self),
            "q_norm": Param("heads head_dim", (n, h), fill=1.0),
            "k_norm": Param("kv_heads head_dim", (k, h), fill=1.0),
            "attention_norm": Param("norm", (self.embed_dim,), fill=1.0),
            "mlp_norm": Param("norm", (self.embed_dim,), fill=1.0),
        }

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        q, k, v = project(w, x)
        q = rms_norm(q, w["q_norm"], self.norm_eps, dims=2)
        k = rms_norm(k, w["k_norm"], self.norm_eps, dims=2)
        q, k = kept(apply_rope(q, tables)), kept(apply_rope(k, tables))
        h = output(w, attend(q, k, v, self.head_dim**-0.5))
        h = rms_norm(constrain(h, "batch stream embed"), w["attention_norm"], self.norm_eps)
        x = constrain(x + h, "batch stream embed")
        h = constrain(feed_forward(self.mlp, w, x), "batch stream embed")
        return constrain(x + rms_norm(h, w["mlp_norm"], self.norm_eps), "batch stream embed"), {}
