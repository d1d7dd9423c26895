"""Decoders whose logits have a soft cap, in a field `logits_soft_cap` of their own."""

from jax import Array

from lmwright.core.param import Tree
from lmwright.models.decoder import Decoder
from lmwright.nn.soft_cap import soft_capped


class SoftCapped(Decoder):
    """A decoder with such a field; it stands behind other bases, whose fields it would hide."""

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        logits, cap = super().logits(w, hidden), self.logits_soft_cap
        return logits if cap is None else soft_capped(logits, cap)
