"""Models over an encoder that score each of its tokens.

    x [B, T, D] --transform, if it was pretrained--> [B, T, D] --out--> logits [B, T, K]

The transform is the one that the encoder's own head goes through before its logits (ModernBERT); a
family whose head over documents has a fresh one (EuroBERT, DeBERTa) has none here.
"""

from abc import abstractmethod
from dataclasses import dataclass

from jax import Array

from lmwright.core.param import Tree
from lmwright.models.heads import HEAD, left_out, score_layer, scores
from lmwright.models.over import OverEncoder


@dataclass(frozen=True)
class OverTokens(OverEncoder):
    """An encoder without its head, and a layer of scores over each of its tokens."""

    @property
    @abstractmethod
    def num_scores(self) -> int:
        """Scores of a token."""

    def spec(self) -> Tree:
        """Every weight, once."""
        spec, dropped = self.encoder.spec(), left_out(self.encoder)
        head = score_layer(self.encoder.embed_dim, self.num_scores)
        return {name: tree for name, tree in spec.items() if name not in dropped} | {HEAD: head}

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        return self.encoder.document_head.weights(w)

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [B, T, K] for hidden [B, T, D]."""
        h = self.encoder.transformed(w, hidden) if self.encoder.document_head.kept else hidden
        return scores(w, h)
