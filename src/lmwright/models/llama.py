"""The llama family (https://arxiv.org/abs/2302.13971): pre-norm blocks, rotary positions,
grouped kv heads (https://arxiv.org/abs/2305.13245), a gated or plain MLP.

    x --+--> norm --> attention --+--> norm --> mlp --+-->
        +-------------------------^ +-----------------^

Biases as in Qwen 2, per-head q and k norms as in Qwen 3, windows as in Mistral are fields, not
other models.
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
from lmwright.errors import UserError
from lmwright.models.block import (
    Bias,
    attention_spec,
    embedding_spec,
    feed_forward,
    mlp_spec,
    output,
    project,
)
from lmwright.models.decoder import Attend, Decoder, Reach, check_decoder, layers_spec
from lmwright.nn.mlp import Mlp
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import apply_rope
from lmwright.nn.rope_scaling import RopeScaling


@dataclass(frozen=True, kw_only=True)
class Llama(Decoder):
    """A decoder of the llama family; its fields are the model."""

    __pydantic_config__ = STRICT
    kind: Literal["llama"] = "llama"
    vocab_size: PositiveInt
    embed_dim: PositiveInt
    mlp_dim: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    seq_len: PositiveInt
    """Context length the model is built for, in tokens."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    """How rotations change for a longer context."""
    window: PositiveInt | None = None
    """Tokens that local layers look at, the query included."""
    layer_pattern: tuple[Reach, ...] = ("local",)
    """Which layers have the window: repeated over all of them."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    mlp: Mlp = "swiglu"
    """Gated (swiglu, geglu with tanh, reglu) or plain (relu, relu2) feed-forward."""
    head: Literal["tied", "untied"] = "tied"
    """Whether the output head is the embedding table."""
    qk_norm: Literal["none", "head"] = "none"
    """RMS norm of q and k over head_dim."""
    bias: Bias = "none"
    """Which projections add a bias."""
    embed_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of fresh embeddings."""

    def __post_init__(self) -> None:
        check_decoder(self)
        if self.window is None and self.layer_pattern != ("local",):
            raise UserError(
                "model.layer_pattern: has no effect without model.window; give the window too"
            )

    def spec(self) -> Tree:
        """Every weight, once."""
        return {
            **embedding_spec(self),
            **layers_spec(self.spans, lambda kind: self._layer_spec()),
            "norm": Param("norm", (self.embed_dim,), fill=1.0),
        }

    def _layer_spec(self) -> Tree:
        layer = attention_spec(self, self.bias) | mlp_spec(self, self.bias)
        for name in ("attention_norm", "mlp_norm"):
            layer[name] = Param("norm", (self.embed_dim,), fill=1.0)
        if self.qk_norm == "head":
            for name in ("q_norm", "k_norm"):
                layer[name] = Param("head_dim", (self.head_dim,), fill=1.0)
        return layer

    def layer(
        self, kind: str, w: Tree, x: Array, tables: tuple[Array, Array], attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        q, k, v = project(w, rms_norm(x, w["attention_norm"], self.norm_eps))
        if self.qk_norm == "head":
            q = rms_norm(q, w["q_norm"], self.norm_eps)
            k = rms_norm(k, w["k_norm"], self.norm_eps)
        q, k = kept(apply_rope(q, tables)), kept(apply_rope(k, tables))
        window = self.window if kind == "local" else None
        h = attend(q, k, v, self.head_dim**-0.5, window=window)  # [B, T, N, H]
        x = constrain(x + output(w, h), "batch stream embed")
        h = rms_norm(x, w["mlp_norm"], self.norm_eps)
        return constrain(x + feed_forward(self.mlp, w, h), "batch stream embed"), {}
