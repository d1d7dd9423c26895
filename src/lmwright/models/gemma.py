"""The Gemma family: Gemma 2 (https://arxiv.org/abs/2408.00118) and the text part of Gemma 3
(https://arxiv.org/abs/2503.19786).

    x --+--> norm --> attention --> norm --+--> norm --> mlp --> norm --+-->
        +----------------------------------^ +--------------------------^

Local layers look through a window, global ones at the whole row. Norms are times 1 + weight,
embeddings times the root of their width. Soft caps are Gemma 2's; norms of q and k, and
rotations of their own for local layers, Gemma 3's.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import STRICT, PositiveInt
from lmwright.core.compute import Compute
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
from lmwright.models.decoder import Attend, Decoder, Reach, check_decoder, layers_spec
from lmwright.nn.mlp import Mlp
from lmwright.nn.norm import rms_norm_from_zero
from lmwright.nn.rope import apply_rope, rope_tables
from lmwright.nn.rope_scaling import RopeScaling

Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Gemma(Decoder):
    """A decoder of the Gemma family; its fields are the model."""

    __pydantic_config__ = STRICT
    kind: Literal["gemma"] = "gemma"
    vocab_size: PositiveInt
    embed_dim: PositiveInt
    mlp_dim: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    seq_len: PositiveInt
    """Context length the model is built for, in tokens."""
    window: PositiveInt
    """Tokens that local layers look at, the query included."""
    layer_pattern: tuple[Reach, ...] = ("local", "global")
    """Which layers have the window: repeated over all of them."""
    query_dim: PositiveInt | None = None
    """Scores are divided by its root; head_dim if unset."""
    attention_soft_cap: Positive | None = None
    """Scores stay between plus and minus this."""
    logits_soft_cap: Positive | None = None
    """Logits stay between plus and minus this."""
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    """How rotations change for a longer context."""
    local_rope_theta: Positive | None = None
    """Theta of local layers, which are then not scaled; that of all layers if unset."""
    norm_eps: Positive = 1e-6
    mlp: Mlp = "geglu"
    """Gated (swiglu, geglu with tanh, reglu) or plain (relu, relu2) feed-forward."""
    head: Literal["tied", "untied"] = "tied"
    """Whether the output head is the embedding table."""
    qk_norm: Literal["none", "head"] = "none"
    """RMS norm of q and k over head_dim."""
    embed_std: Positive = 0.02
    """Standard deviation of fresh embeddings."""

    def __post_init__(self) -> None:
        check_decoder(self)

    def spec(self) -> Tree:
        """Every weight, once."""
        return {
            **embedding_spec(self),
            **layers_spec(self.spans, lambda kind: self._layer_spec()),
            "norm": _norm("norm", self.embed_dim),
        }

    def _layer_spec(self) -> Tree:
        layer = attention_spec(self) | mlp_spec(self)
        for branch in ("attention", "mlp"):
            layer[f"{branch}_norm"] = _norm("norm", self.embed_dim)
            layer[f"{branch}_out_norm"] = _norm("norm", self.embed_dim)
        if self.qk_norm == "head":
            layer |= {name: _norm("head_dim", self.head_dim) for name in ("q_norm", "k_norm")}
        return layer

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        x = super().embedded(w, tokens, compute)
        return x * jnp.asarray(self.embed_dim**0.5, x.dtype)

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer."""
        whole = super().tables(positions, length)
        if self.local_rope_theta is None:
            return {"local": whole, "global": whole}
        local = rope_tables(positions, self.head_dim, self.local_rope_theta)
        return {"local": local, "global": whole}

    def last_norm(self, w: Tree, x: Array) -> Array:
        """The residual stream as the head sees it."""
        return self._norm(x, w["norm"])

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        logits, cap = super().logits(w, hidden), self.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _norm(self, x: Array, scale: Array) -> Array:
        return rms_norm_from_zero(x, scale, self.norm_eps)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        q, k, v = project(w, self._norm(x, w["attention_norm"]))
        if self.qk_norm == "head":
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        q, k = (kept(apply_rope(a, tables[kind])) for a in (q, k))
        scale = (self.query_dim or self.head_dim) ** -0.5
        window = self.window if kind == "local" else None
        h = attend(q, k, v, scale, window=window, soft_cap=self.attention_soft_cap)
        h = constrain(output(w, h), "batch stream embed")
        x = constrain(x + self._norm(h, w["attention_out_norm"]), "batch stream embed")
        h = feed_forward(self.mlp, w, self._norm(x, w["mlp_norm"]))
        h = self._norm(constrain(h, "batch stream embed"), w["mlp_out_norm"])
        return constrain(x + h, "batch stream embed"), {}


def _norm(axis: str, size: int) -> Param:
    return Param(axis, (size,), std=0.0)
