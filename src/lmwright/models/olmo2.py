"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms behind the branches instead of before them,
and norms of q and k over all heads together.

    x --+--> attention --> norm --+--> mlp --> norm --+-->
        +-------------------------^ +-----------------^
"""

from functools import partial
from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import name_result
from lmwright.models.block import (
    OutNorm,
    attention_spec,
    feed_forward,
    mlp_spec,
    output,
    project,
    qk_norm_spec,
    qk_normed,
)
from lmwright.models.decoder import Decoder
from lmwright.models.layers import Attend
from lmwright.nn.attention import Scoring
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import apply_rope


@section
class Olmo2(Decoder):
    """A decoder of the OLMo 2 family; its fields are the model."""

    qk_norm: ClassVar = "all"
    normed_branches: ClassVar = ("o", "down")
    kind: Literal["olmo2"] = "olmo2"
    mlp_dim: PositiveInt
    rope_theta: Positive = 500_000.0
    norm_eps: Positive = 1e-6
    bias: Literal["none", "attention"] = "none"
    """Projections that add a bias."""

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        return {
            **attention_spec(self, self.bias),
            **qk_norm_spec(self, self.qk_norm),
            "attention_norm": Param("norm", (self.embed_dim,), fill=1.0),
            **mlp_spec(self, self.mlp_dim),
            "mlp_norm": Param("norm", (self.embed_dim,), fill=1.0),
        }

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        q, k, v = project(w, x)
        q, k = qk_normed(self.qk_norm, w, q, k, self.norm_eps)
        q, k = name_result(apply_rope(q, tables)), name_result(apply_rope(k, tables))
        h = output(w, attend(q, k, v, Scoring(self.head_dim**-0.5)))
        h = rms_norm(constrain(h, "batch stream embed"), w["attention_norm"], self.norm_eps)
        x = constrain(x + h, "batch stream embed")
        norm = OutNorm("mlp_norm", partial(rms_norm, eps=self.norm_eps))
        h = feed_forward(self.mlp, w, x, attend.mlp_chunk_tokens, norm)
        return constrain(x + h, "batch stream embed"), {}
