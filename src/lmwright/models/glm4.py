"""GLM-4 (https://arxiv.org/abs/2406.12793): neighboring dims of half a head are rotated, few heads
of keys and values, gate and up of the mlp in one matrix. GLM-4-0414 has norms behind the branches,
too."""

from typing import Annotated, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Tree
from lmwright.models.fused import fused_feed_forward, fused_mlp_spec
from lmwright.models.layers import Attend, LayerResult
from lmwright.models.llama import PreNorm
from lmwright.models.out_norms import OutNorms
from lmwright.nn.mlp import GatedMlp
from lmwright.nn.rope_pairs import of_pairs, turn_pairs


class Neighbors(PreNorm):
    """Pre-norm blocks whose rotations turn neighboring dims of a head, from its first on."""

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, for neighboring dims."""
        return of_pairs(super().tables(positions, length))

    def rotated(self, q: Array, k: Array, tables: Tree) -> tuple[Array, Array]:
        """Queries [B, T, N, H] and keys [B, T, K, H] after the rotation of their first dims."""
        turned = []
        for heads in (q, k):
            first, rest = jnp.split(heads, [tables[0].shape[-1]], axis=-1)
            first = turn_pairs(first, tables)
            turned.append(jnp.concatenate([first, rest], axis=-1) if rest.shape[-1] else first)
        return turned[0], turned[1]


@section
class Glm4(OutNorms, Neighbors):
    """A decoder of the GLM-4 family; its fields are the model."""

    kind: Literal["glm4"] = "glm4"
    mlp_dim: PositiveInt
    norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of each head that is rotated, from its first dim on."""
    bias: Literal["none", "qkv"] = "none"
    """Projections that add a bias."""
    out_norms: Literal["none", "branches"] = "branches"
    """Norms of what attention and mlp add, as since GLM-4-0414."""
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def normed_branches(self) -> tuple[str, ...]:  # type: ignore[override]
        """Weights whose products a norm reads."""
        return ("o", "down") if self.out_norms == "branches" else ()

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of a layer's feed-forward, and the norms behind the branches."""
        return fused_mlp_spec(self, self.mlp_dim) | self.out_norm_spec()

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> LayerResult:
        """[B, T, D] of h [B, T, D], and sums over real tokens."""
        h = fused_feed_forward(self.mlp, w, h, attend.mlp_chunk_tokens)
        return self.out_normed(w, "mlp_out_norm", h), {}
