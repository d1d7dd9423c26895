"""The Gemma family: Gemma 2 (https://arxiv.org/abs/2408.00118), the text part of Gemma 3
(https://arxiv.org/abs/2503.19786) and VaultGemma (https://arxiv.org/abs/2510.15001).

    x --+--> norm --> attention --> norm --+--> norm --> mlp --> norm --+-->
        +----------------------------------^ +--------------------------^

Local layers look through a window, global ones at the whole row. Norms are times 1 + weight,
embeddings times the root of their width. Soft caps are Gemma 2's; norms of q and k, and
rotations of their own for local layers, Gemma 3's. VaultGemma has no norms behind the branches.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.param import Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import name_result
from lmwright.models.block import OutNorm, attention_spec, feed_forward, mlp_spec, output, project
from lmwright.models.by_reach import tables_by_reach
from lmwright.models.decoder import AnyMlp, Head, LayerReach
from lmwright.models.from_zero import FromZero, norm_from_zero
from lmwright.models.layers import Attend
from lmwright.models.soft_cap import SoftCapped
from lmwright.nn.attention import Scoring
from lmwright.nn.rope import apply_rope


def times_root(x: Array) -> Array:
    """Embeddings x [..., D] times the root of their width."""
    return x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)


class ScaledEmbedding(FromZero):
    """A decoder whose norms are times 1 + weight, and embeddings times the root of their width."""

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        return times_root(super().embedded(w, tokens, compute))


@section
class Gemma(ScaledEmbedding, SoftCapped):
    """A decoder of the Gemma family; its fields are the model."""

    kind: Literal["gemma"] = "gemma"
    mlp_dim: PositiveInt
    window: PositiveInt
    """Tokens that local layers look at, the query included."""
    layer_pattern: tuple[LayerReach, ...] = ("local", "global")
    """Reach of each layer; the pattern repeats over all layers."""
    query_dim: PositiveInt | None = None
    """Dimension whose root scores are divided by; head_dim if unset."""
    attention_soft_cap: Positive | None = None
    """Bound on the magnitude of attention scores."""
    logits_soft_cap: Positive | None = None  # type: ignore[misc]
    """Bound on the magnitude of logits."""
    local_rope_theta: Positive | None = None
    """Theta of local layers, which are then not scaled; that of all layers if unset."""
    norm_eps: Positive = 1e-6
    mlp: AnyMlp = "geglu"
    head: Head = "tied"
    qk_norm: Literal["none", "head"] = "none"  # type: ignore[misc]
    """RMS norm of q and k over head_dim."""
    out_norms: Literal["none", "branches"] = "branches"
    """Norms of what attention and mlp add; VaultGemma has none."""

    @property
    def normed_branches(self) -> tuple[str, ...]:  # type: ignore[override]
        """Weights whose products a norm reads."""
        return ("o", "down") if self.out_norms == "branches" else ()

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, self.layer_pattern

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        layer = attention_spec(self) | mlp_spec(self, self.mlp_dim)
        places = ("norm", "out_norm") if self.normed_branches else ("norm",)
        for branch in ("attention", "mlp"):
            for place in places:
                layer[f"{branch}_{place}"] = norm_from_zero("norm", self.embed_dim)
        if self.qk_norm == "head":
            layer |= {
                name: norm_from_zero("head_dim", self.head_dim) for name in ("q_norm", "k_norm")
            }
        return layer

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer."""
        return tables_by_reach(self, self.local_rope_theta, positions, length)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        q, k, v = project(w, self._norm(x, w["attention_norm"]))
        if self.qk_norm == "head":
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        q, k = (name_result(apply_rope(a, tables[kind])) for a in (q, k))
        scale = (self.query_dim or self.head_dim) ** -0.5
        window, soft_cap = self.window_of(kind), self.attention_soft_cap
        h = attend(q, k, v, Scoring(scale, window, soft_cap))
        h = constrain(output(w, h), "batch stream embed")
        out_norm = OutNorm("mlp_out_norm", self._norm) if self.normed_branches else None
        if out_norm is not None:
            h = self._norm(h, w["attention_out_norm"])
        x = constrain(x + h, "batch stream embed")
        h = self._norm(x, w["mlp_norm"])
        h = feed_forward(self.mlp, w, h, attend.mlp_chunk_tokens, out_norm)
        return constrain(x + h, "batch stream embed"), {}
