"""Phi-3 (https://arxiv.org/abs/2404.14219): a llama whose projections into attention and into
the mlp are one matrix each, and whose heads may be rotated in part.

    qkv      embed -> heads head_dim     the heads of q, then those of k, then those of v
    gate_up  embed -> gate_up mlp        the gate, then what it multiplies

They stay one matrix here, because everything made for Phi-3 knows them so: LoRA's factors,
GGUF files. Over `mesh.tensor` q, k and v are cut apart behind the product, which costs a move of
activations that the other families do not need.
"""

from typing import Annotated, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import dot, name_result
from lmwright.models.block import attention_spec, output
from lmwright.models.decoder import Decoder, LayerReach
from lmwright.models.fused import fused_feed_forward, fused_mlp_spec
from lmwright.models.layers import Attend
from lmwright.nn.attention import Scoring
from lmwright.nn.mlp import GatedMlp
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import apply_rope


@section
class Phi3(Decoder):
    """A decoder of the Phi-3 family; its fields are the model."""

    kind: Literal["phi3"] = "phi3"
    mlp_dim: PositiveInt
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each head that is rotated, from its first dim on."""
    window: PositiveInt | None = None
    """Tokens that a query looks at, itself included."""
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, ("local",)

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        d, heads = self.embed_dim, self.num_heads + 2 * self.num_kv_heads
        return {
            "attention_norm": Param("norm", (d,), fill=1.0),
            "qkv": Param("embed -> heads head_dim", (d, heads, self.head_dim)),
            "o": attention_spec(self)["o"],
            "mlp_norm": Param("norm", (d,), fill=1.0),
            **fused_mlp_spec(self, self.mlp_dim),
        }

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        h = rms_norm(x, w["attention_norm"], self.norm_eps)
        cuts = [self.num_heads, self.num_heads + self.num_kv_heads]
        q, k, v = jnp.split(dot("btd,dnh->btnh", h, w["qkv"]), cuts, axis=2)
        q = constrain(q, "batch seq heads head_dim")
        q, k = name_result(apply_rope(q, tables)), name_result(apply_rope(k, tables))
        h = attend(q, k, v, Scoring(self.head_dim**-0.5, self.window_of(kind)))
        x = constrain(x + output(w, h), "batch stream embed")
        h = rms_norm(x, w["mlp_norm"], self.norm_eps)
        h = fused_feed_forward(self.mlp, w, h, attend.mlp_chunk_tokens)
        return constrain(x + h, "batch stream embed"), {}
