"""Layers with experts of which some look through a window and others at the whole row."""

from jax import Array

from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.models.by_reach import reach_in
from lmwright.models.decoder import LayerReach, reaches
from lmwright.models.layers import Attend
from lmwright.models.moe import MoeDecoder


class MoeByReach(MoeDecoder):
    """A decoder with experts whose kinds of layers are a reach and a feed-forward; `tables` has the
    rotations of each reach."""

    layer_pattern: tuple[LayerReach, ...]

    @property
    def reaches(self) -> tuple[LayerReach, ...]:
        """The reach of each layer."""
        return reaches(self.layer_pattern, self.num_layers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: its reach, and what its feed-forward is."""
        pairs = zip(self.reaches, super().kinds, strict=True)
        return tuple(f"{reach} {feed_forward}" for reach, feed_forward in pairs)

    def window_of(self, kind: str) -> int | None:
        """Tokens that queries of such a layer look at, themselves included; None for all."""
        return self.window if reach_in(kind) == "local" else None

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that attention adds to x [B, T, D]."""
        return super().mixed(kind, w, x, tables[reach_in(kind)], attend)

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of the experts, or of a plain mlp."""
        return super().ffn_spec(_feed_forward(kind))

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D], and what the router did."""
        return super().ffn(_feed_forward(kind), w, h, attend)


def _feed_forward(kind: str) -> str:
    return kind.split()[1]
