"""Blocks with layer norms, whose feed-forward follows attention or reads the same stream:

sequential    x --+--> norm --> attention --+--> norm --> mlp --+-->
                  +-------------------------^ +-----------------^

parallel      x --+--> norm --+--> attention --+--+-->
                  |           +--> mlp --------+  |
                  +-------------------------------^
"""

from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from lmwright.core.param import Tree
from lmwright.core.sharding import constrain
from lmwright.models import block
from lmwright.models.layer_norms import norm_spec, normed
from lmwright.models.layers import Attend, LayerResult
from lmwright.models.llama import PreNorm

Residual = Literal["parallel", "sequential"]
RotaryFraction = Annotated[
    float,
    Field(gt=0, le=1, description="Share of each head that is rotated, from its first dim on."),
]


class LayerNormed(PreNorm):
    """A decoder of blocks with layer norms."""

    norm_biases: ClassVar[bool] = True  # whether norms of the stream add a bias
    residual: Residual = "sequential"
    rotary_fraction: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    def norms_spec(self, *names: str) -> Tree:
        """Weights of norms of the stream."""
        return norm_spec(self.embed_dim, *names, biases=self.norm_biases)

    def spec(self) -> Tree:
        """Every weight, once."""
        rest = {name: param for name, param in super().spec().items() if name != "norm"}
        return rest | self.norms_spec("norm")

    def mixer_spec(self, kind: str) -> Tree:
        """Weights of what joins tokens; each head of queries and keys has a norm of its own."""
        norms = block.qk_norm_spec(self, "none" if self.qk_norm == "none" else "all")
        return block.attention_spec(self, self.bias) | norms

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        names = ("attention_norm", *(("mlp_norm",) if self.residual == "sequential" else ()))
        return self.mixer_spec(kind) | self.norms_spec(*names) | self.ffn_spec(kind)

    def stream_norm(self, w: Tree, x: Array, name: str = "norm") -> Array:
        """x [B, T, D] after the norm of this name; the last one's is what the head sees."""
        return normed(w, name, x, self.norm_eps)

    def attention_input(self, w: Tree, x: Array) -> Array:
        """The input of the q, k and v projections, [B, T, D]; x where its norm was taken before."""
        return x if self.residual == "parallel" else super().attention_input(w, x)

    def normed(self, w: Tree, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values before the rotation."""
        if self.qk_norm == "none":
            return q, k, v
        return normed(w, "q_norm", q, self.norm_eps), normed(w, "k_norm", k, self.norm_eps), v

    def layer(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> LayerResult:
        """x [B, T, D] after attention and feed-forward."""
        if self.residual == "sequential":
            return super().layer(kind, w, x, tables, attend)
        h = self.stream_norm(w, x, "attention_norm")
        after = constrain(x + self.mixed(kind, w, h, tables, attend), "batch stream embed")
        y, aux = self.ffn(kind, w, h, attend)
        return constrain(after + y, "batch stream embed"), aux
