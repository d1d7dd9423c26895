"""Phi-3 (https://arxiv.org/abs/2404.14219): a llama whose projections into attention and into
the mlp are one matrix each, and whose heads may be rotated in part.

    qkv      embed -> heads head_dim     the heads of q, then those of k, then those of v
    gate_up  embed -> gate_up mlp        the gate, then what it multiplies

They stay one matrix here, because everything made for Phi-3 knows them so: LoRA's factors,
GGUF files. Over `mesh.tensor` q, k and v are cut apart behind the product, which costs a move of
activations that the other families do not need.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import STRICT, PositiveInt
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import dot, kept
from lmwright.models.block import attention_spec, embedding_spec, mlp_spec, output
from lmwright.models.decoder import Attend, Decoder, check_decoder, layers_spec
from lmwright.nn.mlp import gated
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import apply_rope
from lmwright.nn.rope_scaling import RopeScaling

Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Phi3(Decoder):
    """A decoder of the Phi-3 family; its fields are the model."""

    __pydantic_config__ = STRICT
    kind: Literal["phi3"] = "phi3"
    vocab_size: PositiveInt
    embed_dim: PositiveInt
    mlp_dim: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    seq_len: PositiveInt
    """Context length the model is built for, in tokens."""
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    """How rotations change for a longer context."""
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each head that is rotated, from its first dim on."""
    window: PositiveInt | None = None
    """Tokens that a query looks at, itself included."""
    norm_eps: Positive = 1e-5
    mlp: Literal["swiglu", "geglu", "reglu"] = "swiglu"
    """Gate of the feed-forward."""
    head: Literal["tied", "untied"] = "untied"
    """Whether the output head is the embedding table."""
    embed_std: Positive = 0.02
    """Standard deviation of fresh embeddings."""

    def __post_init__(self) -> None:
        check_decoder(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """All layers are of one kind."""
        return ("global" if self.window is None else "local",) * self.num_layers

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    def spec(self) -> Tree:
        """Every weight, once."""
        return {
            **embedding_spec(self),
            **layers_spec(self.spans, lambda kind: self._layer_spec()),
            "norm": Param("norm", (self.embed_dim,), fill=1.0),
        }

    def _layer_spec(self) -> Tree:
        d, heads = self.embed_dim, self.num_heads + 2 * self.num_kv_heads
        return {
            "attention_norm": Param("norm", (d,), fill=1.0),
            "qkv": Param("embed -> heads head_dim", (d, heads, self.head_dim)),
            "o": attention_spec(self)["o"],
            "mlp_norm": Param("norm", (d,), fill=1.0),
            "gate_up": Param("embed -> gate_up mlp", (d, 2, self.mlp_dim)),
            "down": mlp_spec(self)["down"],
        }

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        h = rms_norm(x, w["attention_norm"], self.norm_eps)
        cuts = [self.num_heads, self.num_heads + self.num_kv_heads]
        q, k, v = jnp.split(dot("btd,dnh->btnh", h, w["qkv"]), cuts, axis=2)
        q = constrain(q, "batch seq heads head_dim")
        q, k = kept(apply_rope(q, tables)), kept(apply_rope(k, tables))
        window = self.window if kind == "local" else None
        h = attend(q, k, v, self.head_dim**-0.5, window=window)
        x = constrain(x + output(w, h), "batch stream embed")
        h = dot("btd,dgf->btgf", rms_norm(x, w["mlp_norm"], self.norm_eps), w["gate_up"])
        h = constrain(gated(self.mlp, h[:, :, 0], h[:, :, 1]), "batch seq mlp")
        return constrain(x + dot("btf,fd->btd", h, w["down"]), "batch stream embed"), {}
