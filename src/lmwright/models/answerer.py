"""Answerer: an encoder that scores each token of a context as the first or the last one of an
answer, as transformers' models for question answering.

    x [B, T, D] --transform, if it was pretrained--> [B, T, D] --out--> logits [B, T, 2]

The transform is that of `models.over_tokens`.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from lmwright.models.heads import document_head_of
from lmwright.models.hf.answerer import ANSWERER, TASK
from lmwright.models.over_tokens import OverTokens


@dataclass(frozen=True)
class Answerer(OverTokens):
    """An encoder without its head, and a layer of two scores over each of its tokens."""

    hf: ClassVar = ANSWERER
    called: ClassVar[str] = "a model that answers questions"
    task: ClassVar[str] = TASK
    pairs_begin_once: ClassVar[bool] = True
    saves_head: ClassVar[bool] = True

    window_tokens: int
    """Tokens of a question and a part of its context."""
    window_overlap: int
    """Tokens of the context that neighboring windows share."""
    max_answer_tokens: int
    """Tokens of the longest answer that is given."""
    no_answer: Literal["allowed", "never"]
    """`allowed` if a question may get no answer."""

    @property
    def num_scores(self) -> int:
        """Scores of a token: as the first one of an answer, and as the last one."""
        return 2

    def note(self) -> dict[str, Any]:
        """Settings by which windows are cut and answers chosen."""
        own = (field.name for field in fields(self) if field.name != "encoder")
        return {"answers": {name: getattr(self, name) for name in own}}


def has_answers(family: Any) -> bool:
    """True for a model, or a family of them, that has a class for question answering in
    transformers."""
    head = document_head_of(family)
    return head is not None and head.answers
