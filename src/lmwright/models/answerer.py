"""Answerer: an encoder that scores each token of a context as the first or the last one of an
answer, as transformers' models for question answering.

    x [B, T, D] --transform, if it was pretrained--> [B, T, D] --out--> logits [B, T, 2]

The transform is the one that the encoder's own head goes through before its logits (ModernBERT);
DeBERTa has none here.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jax import Array

from lmwright.core.param import Tree
from lmwright.models.heads import HEAD, left_out, score_layer, scores
from lmwright.models.hf.answerer import AnswererHf
from lmwright.models.over import OverEncoder


@dataclass(frozen=True)
class Answerer(OverEncoder):
    """An encoder without its head, and a layer of two scores over each of its tokens."""

    called: ClassVar[str] = "a model that answers questions"

    window_tokens: int
    """Tokens of a question and a part of its context."""
    window_overlap: int
    """Tokens of the context that neighboring windows share."""
    max_answer_tokens: int
    """Tokens of the longest answer that is given."""
    no_answer: Literal["allowed", "never"]
    """Whether a question may get none."""

    @property
    def hf(self) -> AnswererHf:
        """Its table of Hugging Face names."""
        return AnswererHf(self)

    def spec(self) -> Tree:
        """Every weight, once."""
        spec, dropped = self.encoder.spec(), left_out(self.encoder)
        head = score_layer(self.encoder.embed_dim, 2)
        return {name: tree for name, tree in spec.items() if name not in dropped} | {HEAD: head}

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        return self.document_head.weights(w)

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [B, T, 2] for hidden [B, T, D]: of the first token, and of the last one."""
        h = self.encoder.transformed(w, hidden) if self.document_head.kept else hidden
        return scores(w, h)


def has_answers(family: Any) -> bool:
    """True for a model, or a family of them, that has a class for question answering in
    transformers."""
    head = getattr(family, "document_head", None)
    return head is not None and head.answers
