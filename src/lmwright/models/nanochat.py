"""nanochat (https://github.com/karpathy/nanochat), the models of its first releases: norms without
weights, of the embeddings too, and of queries and keys behind a rotation that turns the other way.

    tokens --embed--> norm --> blocks --> norm --> logits --> soft cap

    x --+--> norm --> attention --+--> norm --> up --> relu^2 --> down --+-->
        +-------------------------^ +------------------------------------^
"""

from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.param import Tree
from lmwright.core.weight import name_result
from lmwright.models import block
from lmwright.models.decoder import Head
from lmwright.models.layers import Attend
from lmwright.models.llama import PreNorm
from lmwright.models.soft_cap import SoftCapped
from lmwright.nn.attention import Scoring
from lmwright.nn.mlp import PlainMlp
from lmwright.nn.unit_norm import unit_norm


@section
class NanoChat(PreNorm, SoftCapped):
    """A decoder of the nanochat models; its fields are the model."""

    qk_norm: ClassVar = "head"
    kind: Literal["nanochat"] = "nanochat"
    mlp_dim: PositiveInt
    norm_eps: Positive = 1e-6
    logits_soft_cap: Positive | None = 15.0  # type: ignore[misc]
    """Bound on the magnitude of logits."""
    head: Head = "untied"
    bias: Literal["none", "attention"] = "none"
    """Projections that add a bias."""
    mlp: PlainMlp = "relu2"
    """Activation of the feed-forward."""

    def spec(self) -> Tree:
        """Every weight, once."""
        return _without_norms(super().spec())

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        return _without_norms(super().layer_spec(kind))

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        return unit_norm(super().embedded(w, tokens, compute), self.norm_eps)

    def stream_norm(self, w: Tree, x: Array, name: str = "norm") -> Array:
        """x [B, T, D] after the norm of this name, none of which has a weight."""
        return unit_norm(x, self.norm_eps)

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by negative angles."""
        cos, sin = super().tables(positions, length)
        return cos, -sin

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that attention adds to x [B, T, D]."""
        q, k, v = block.project(w, self.attention_input(w, x))
        rotated = self.rotated(q, k, tables)
        q, k = (name_result(unit_norm(a, self.norm_eps)) for a in rotated)
        return block.output(w, attend(q, k, v, Scoring(self.score_scale, self.window_of(kind))))


def _without_norms(spec: Tree) -> Tree:
    return {name: param for name, param in spec.items() if "norm" not in name}
