"""Norms behind attention and feed-forward of pre-norm blocks, beside those before them.

x --+--> norm --> attention --> norm --+--> norm --> mlp --> norm --+-->
    +----------------------------------^ +--------------------------^
"""

from jax import Array

from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.models.layers import Attend, LayerResult
from lmwright.models.llama import PreNorm
from lmwright.nn.norm import rms_norm


class OutNorms(PreNorm):
    """Pre-norm blocks with a norm behind each branch, where `normed_branches` names some."""

    def out_norm_spec(self) -> Tree:
        """Weights of the norms behind the branches."""
        names = ("attention_out_norm", "mlp_out_norm") if self.normed_branches else ()
        return {name: Param("norm", (self.embed_dim,), fill=1.0) for name in names}

    def out_normed(self, w: Tree, name: str, h: Array) -> Array:
        """h [B, T, D] after the norm of this name, where there is one."""
        if name not in w:
            return h
        return rms_norm(constrain(h, "batch stream embed"), w[name], self.norm_eps)

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that attention adds to x [B, T, D]."""
        return self.out_normed(w, "attention_out_norm", super().mixed(kind, w, x, tables, attend))

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of a layer's feed-forward, and the norms behind the branches."""
        return super().ffn_spec(kind) | self.out_norm_spec()

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> LayerResult:
        """[B, T, D] of h [B, T, D], and sums over real tokens."""
        y, aux = super().ffn(kind, w, h, attend)
        return self.out_normed(w, "mlp_out_norm", y), aux
