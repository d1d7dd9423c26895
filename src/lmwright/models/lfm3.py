"""LFM3 (https://huggingface.co/LiquidAI/LFM3-1.7B): LFM2 with a norm behind each branch, a gate on
each head of attention, and windows in some of its layers.

    x --+--> norm --> conv or attention --> norm --+--> norm --> mlp --> norm --+-->
        +------------------------------------------^ +--------------------------^
"""

from typing import ClassVar, Literal

import jax
from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import HEADS
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products, dot, name_result
from lmwright.models.block import OutNorm, feed_forward, output, project
from lmwright.models.by_reach import tables_by_reach
from lmwright.models.decoder import Head, LayerReach, repeated
from lmwright.models.layers import Attend
from lmwright.models.lfm2 import CONV, ConvTokens, ShortConv, short_conv
from lmwright.nn.attention import Scoring
from lmwright.nn.norm import rms_norm

ConvOrReach = Literal["conv"] | LayerReach


@section
class Lfm3(ShortConv):
    """A decoder of the LFM3 family; its fields are the model."""

    mlp: ClassVar[Literal["swiglu"]] = "swiglu"  # type: ignore[misc]
    qk_norm: ClassVar = "head"
    normed_branches: ClassVar = ("o", "conv_out", "down")

    kind: Literal["lfm3"] = "lfm3"
    mlp_dim: PositiveInt
    mixer_pattern: tuple[ConvOrReach, ...] = ("conv", "local", "conv", "global")
    """A convolution, or the reach of attention, in each layer; repeats over all layers."""
    window: PositiveInt = 256
    """Tokens that local layers look at, the query included."""
    conv_tokens: ConvTokens = 7
    rope_theta: Positive = 1_000_000.0
    local_rope_theta: Positive | None = 10_000.0
    """Theta of local layers, which are then not scaled; that of all layers if unset."""
    head: Head = "tied"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: a convolution, or the reach of its attention."""
        return repeated("mixer_pattern", self.mixer_pattern, self.num_layers, '["conv", "global"]')

    def window_of(self, kind: str) -> int | None:
        """Tokens that queries of such a layer look at, themselves included; None for all."""
        return self.window if kind == "local" else None

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        d = self.embed_dim
        norms = ("attention_out_norm", "mlp_out_norm")
        gate = {} if kind == CONV else {"head_gate": Param("embed -> heads", (d, self.num_heads))}
        own = {name: Param("norm", (d,), fill=1.0) for name in norms}
        return super().layer_spec(kind) | gate | own

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer."""
        return tables_by_reach(self, self.local_rope_theta, positions, length)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after its mixer and mlp."""
        h = self._norm(x, w["attention_norm"])
        if kind == CONV:
            h = short_conv(w, h, attend)
        else:
            h = self._attention(kind, w, h, tables[kind], attend)
        h = self._norm(constrain(h, "batch stream embed"), w["attention_out_norm"])
        x = constrain(x + h, "batch stream embed")
        out_norm = OutNorm("mlp_out_norm", self._norm)
        h = self._norm(x, w["mlp_norm"])
        h = feed_forward("swiglu", w, h, attend.mlp_chunk_tokens, out_norm)
        return constrain(x + h, "batch stream embed"), {}

    def _norm(self, x: Array, scale: Array) -> Array:
        return rms_norm(x, scale, self.norm_eps)

    def _attention(self, kind: str, w: Tree, h: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] of normed h [B, T, D]."""
        q, k, v = self.normed(w, *project(w, h))
        q, k = map(name_result, self.rotated(q, k, tables))
        gate = name_result(dot("btd,dn->btn", before_products(h), w["head_gate"]), HEADS)
        h = attend(q, k, v, Scoring(self.head_dim**-0.5, self.window_of(kind)))
        return output(w, h * jax.nn.sigmoid(gate)[..., None])
