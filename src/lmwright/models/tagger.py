"""Tagger: an encoder that gives each token scores of tags, as transformers' token classifiers.

    x [B, T, D] --transform, if it was pretrained--> [B, T, D] --out--> logits [B, T, K]

The transform is that of `models.over_tokens`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from lmwright.models.hf.tagger import TAGGER
from lmwright.models.over_tokens import OverTokens


@dataclass(frozen=True)
class Tagger(OverTokens):
    """An encoder without its head, and a layer of scores over each of its tokens."""

    hf: ClassVar = TAGGER
    called: ClassVar[str] = "a tagger"
    task: ClassVar[str] = "token-classification"
    saves_head: ClassVar[bool] = True

    labels: tuple[str, ...]
    """The tags, in the order of their numbers."""

    @property
    def num_scores(self) -> int:
        """Scores of a token, one for each tag."""
        return len(self.labels)

    def note(self) -> dict[str, Any]:
        """The tags."""
        return {"labels": self.labels}
