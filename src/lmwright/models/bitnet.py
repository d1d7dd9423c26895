"""BitNet b1.58 (https://arxiv.org/abs/2402.17764, https://arxiv.org/abs/2504.12285): a llama whose
projections have the weights -1, 0 and 1 and read activations of 8 bits, with two more norms.

    x --+--> norm --> attention --> norm --> o --+--> norm --> gate, up --> norm --> down --+-->
        +----------------------------------------^ +----------------------------------------^

The weights that are trained are floats (`core.ternary`); embeddings, head and norms stay floats.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.core.stack import Aux
from lmwright.core.ternary import in_codes
from lmwright.errors import UserError
from lmwright.models.block import OutNorm, feed_forward
from lmwright.models.decoder import Head
from lmwright.models.layers import Attend
from lmwright.models.llama import PreNorm
from lmwright.nn.attention import Scoring
from lmwright.nn.norm import rms_norm


@section
class BitNet(PreNorm):
    """A decoder with ternary weights; its fields are the model."""

    bias: ClassVar = "none"  # type: ignore[misc]
    kind: Literal["bitnet"] = "bitnet"
    mlp_dim: PositiveInt
    mlp: Literal["relu2glu", "swiglu"] = "relu2glu"
    """Gated mlp: squared ReLU as in the 2B model, or SwiGLU as in the papers before, which
    llama.cpp can run."""
    rope_theta: Positive = 500_000.0
    head: Head = "tied"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads * self.head_dim != self.embed_dim:
            raise UserError(
                f"model.head_dim: {self.num_heads} heads of {self.head_dim} are not model.embed_dim"
                f" = {self.embed_dim}, as every reader of a BitNet takes them to be; change one"
            )

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        spec = {
            name: replace(param, ternary=param.is_matrix)
            for name, param in super().layer_spec(kind).items()
        }
        heads = (self.num_heads, self.head_dim)
        return spec | {
            "attention_sub_norm": Param("heads head_dim", heads, fill=1.0),
            "mlp_sub_norm": Param("mlp", (self.mlp_dim,), fill=1.0),
        }

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """The feed-forward of a layer, [B, T, D] to [B, T, D]."""
        norm = OutNorm("mlp_sub_norm", partial(rms_norm, eps=self.norm_eps))
        return feed_forward(self.mlp, w, h, attend.mlp_chunk_tokens, sub_norm=norm), {}

    def layer(self, kind: str, w: Tree, x: Array, tables: Any, attend: Attend) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and feed-forward."""
        w = in_codes(self.layer_spec(kind), w)

        def normed(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
            h = attend(q, k, v, scoring)  # [B, T, N, H]
            return rms_norm(h, w["attention_sub_norm"], self.norm_eps, dims=2)

        return super().layer(kind, w, x, tables, replace(attend, run=normed))
