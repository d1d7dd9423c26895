"""Granite 3 (https://huggingface.co/ibm-granite/granite-3.3-8b-base): blocks of a llama, with four
multipliers, by which a learning rate found on small models fits large ones
(https://arxiv.org/abs/2203.03466).

    x * embedding --+--> norm --> attention * residual --+--> norm --> mlp * residual --+-->
                    +------------------------------------^ +---------------------------^
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.param import Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.models.decoder import Head
from lmwright.models.layers import Attend
from lmwright.models.llama import PreNorm


@section
class Multiplied(PreNorm):
    """Blocks of a llama with Granite's multipliers."""

    embedding_multiplier: Positive = 1.0
    """Factor on embeddings."""
    attention_multiplier: Positive | None = None
    """Factor on attention scores; one over the root of head_dim if unset."""
    residual_multiplier: Positive = 1.0
    """Factor on what attention and mlp add to the residual stream."""
    logits_scaling: Positive = 1.0
    """Number that logits are divided by."""
    head: Head = "tied"

    @property
    def score_scale(self) -> float:
        """Factor on attention scores."""
        return self.attention_multiplier or super().score_scale

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        return times(super().embedded(w, tokens, compute), self.embedding_multiplier)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after what joins tokens and feed-forward."""
        h = self.mixed(kind, w, x, tables, attend)
        x = constrain(x + self._branch(h), "batch stream embed")
        y, aux = self.ffn(kind, w, self.stream_norm(w, x, "mlp_norm"), attend)
        return constrain(x + self._branch(y), "batch stream embed"), aux

    def _branch(self, h: Array) -> Array:
        return times(constrain(h, "batch stream embed"), self.residual_multiplier)

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        return super().logits(w, hidden) / self.logits_scaling


@section
class Granite(Multiplied):
    """A decoder of the Granite family; its fields are the model."""

    kind: Literal["granite"] = "granite"
    mlp_dim: PositiveInt
    bias: Literal["none", "attention", "mlp", "all"] = "none"
    """Projections that add a bias."""


def times(x: Array, factor: float) -> Array:
    """x times a factor that is not rounded to the precision of x, as in transformers."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)
