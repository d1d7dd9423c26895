"""A head whose logits have a bias for each token of the vocabulary."""

from typing import Literal

from jax import Array

from lmwright.core.param import Param, Tree
from lmwright.models import block
from lmwright.models.llama import PreNorm

HeadBias = Literal["none", "all"]


class BiasedHead(PreNorm):
    """A decoder whose head adds a bias, where `head_bias` says so."""

    head_bias: HeadBias = "none"

    def embedding_spec(self) -> Tree:
        """The embedding table, the head and its bias."""
        bias = {"head_bias": Param("vocab", (self.vocab_size,), fill=0.0)}
        return super().embedding_spec() | (bias if self.head_bias == "all" else {})

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        bias = {"head_bias": w["head_bias"]} if self.head_bias == "all" else {}
        return super().head_weights(w) | bias

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        return block.with_bias(super().logits(w, hidden), w, "head")
