"""Tagger: an encoder that gives each token scores of tags, as transformers' token classifiers.

    x [B, T, D] --transform, if it was pretrained--> [B, T, D] --out--> logits [B, T, K]

The transform is the one that the encoder's own head goes through before its logits (ModernBERT); a
family whose head over documents has a fresh one (EuroBERT, DeBERTa) has none here.
"""

from dataclasses import dataclass
from typing import ClassVar

from jax import Array

from lmwright.core.param import Tree
from lmwright.models.heads import HEAD, left_out, score_layer, scores
from lmwright.models.hf.tagger import TaggerHf
from lmwright.models.over import OverEncoder


@dataclass(frozen=True)
class Tagger(OverEncoder):
    """An encoder without its head, and a layer of scores over each of its tokens."""

    called: ClassVar[str] = "a tagger"

    labels: tuple[str, ...]
    """The tags; their places are their numbers."""

    @property
    def hf(self) -> TaggerHf:
        """Its table of Hugging Face names."""
        return TaggerHf(self)

    def spec(self) -> Tree:
        """Every weight, once."""
        spec, dropped = self.encoder.spec(), left_out(self.encoder)
        head = score_layer(self.encoder.embed_dim, len(self.labels))
        return {name: tree for name, tree in spec.items() if name not in dropped} | {HEAD: head}

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        return self.document_head.weights(w)

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [B, T, K] for hidden [B, T, D]."""
        h = self.encoder.transformed(w, hidden) if self.document_head.kept else hidden
        return scores(w, h)
