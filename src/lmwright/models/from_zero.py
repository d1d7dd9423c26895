"""Decoders whose norms are times 1 + weight, so that a weight of 0 changes nothing."""

from jax import Array

from lmwright.core.param import Param, Tree
from lmwright.models.decoder import Decoder
from lmwright.nn.norm import rms_norm_from_zero


class FromZero(Decoder):
    """A decoder with such norms, the last one among them."""

    def spec(self) -> Tree:
        """Every weight, once."""
        return super().spec() | {"norm": norm_from_zero("norm", self.embed_dim)}

    def stream_norm(self, w: Tree, x: Array, name: str = "norm") -> Array:
        """x [B, T, D] after the norm of this name; the last one's is what the head sees."""
        return self._norm(x, w[name])

    def _norm(self, x: Array, scale: Array) -> Array:
        return rms_norm_from_zero(x, scale, self.norm_eps)


def norm_from_zero(axis: str, size: int) -> Param:
    """The weight of such a norm."""
    return Param(axis, (size,), std=0.0)
