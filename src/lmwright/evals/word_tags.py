"""Word tags: the tag of each word of a text, by a tagger.

text --spaces--> words --first token of each, cut--> packed rows [B, T] --tagger--> tags
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lmwright.core.compute import Compute
from lmwright.data.tokens.tags import Words, words_as_tokens
from lmwright.errors import UserError
from lmwright.evals.documents import Columns, Reader, of_tokens
from lmwright.evals.tallies import Tally, refuse_threshold, softmax
from lmwright.formats.loaded import LoadedModel
from lmwright.models.tagger import Tagger


class Text(NamedTuple):
    """A text as words, and as the tokens of those that fit."""

    words: list[str]
    tokens: Words


class Tagged(NamedTuple):
    """Words and their raw scores."""

    words: list[str]
    scores: np.ndarray
    """float64 [words, K]; NaN for a word that was cut or has no token of its own."""


class WordTags(Reader):
    """A tagger, ready for texts."""

    def __init__(
        self,
        loaded: LoadedModel,
        compute: Compute,
        columns: Columns,
        threshold: float | None = None,
    ):
        refuse_columns(columns.pair, columns.label)
        refuse_threshold(threshold)
        super().__init__(loaded)
        self.model: Tagger = loaded.model
        self.weights = loaded.weights
        self.tally = TagTally(self.model.labels)
        self._run = self.program(partial(self.model.compared, compute=compute))

    def encode(
        self, texts: Sequence[str], seconds: Sequence[str] | None = None
    ) -> tuple[list[Text], list[bool]]:
        """Each text as words, and whether they were cut to what the model takes.
        `seconds` are always None (`refuse_columns`)."""
        room = max(0, self.most - sum(map(len, self.around)))
        each = [text.split() for text in texts]
        fitted = partial(words_as_tokens, self.tokenizer, room=room, side=self.side)
        made = [Text(words, fitted(words)) for words in each]
        return made, [text.tokens.cut for text in made]

    def scores(self, texts: Sequence[Text]) -> list[Tagged]:
        """The words of texts with their raw scores."""
        before, after = self.around
        end = [self.tokenizer.eos_id or 0]  # of a text that no token stands for
        ids = [[*before, *text.tokens.ids.tolist(), *after] or end for text in texts]
        found = of_tokens(self._run, ids, self.most)
        made = []
        for text, of_text in zip(texts, found, strict=True):
            scores = np.full((len(text.words), len(self.model.labels)), np.nan)
            scores[text.tokens.word] = of_text[len(before) + text.tokens.first]
            made.append(Tagged(text.words, scores))
        return made


def refuse_columns(pair: str | None, label: str | None) -> None:
    """Raises UserError for columns that a tagger does not read."""
    if pair is not None:
        raise UserError(
            f"--pair-column: {pair!r} is a second text, and a tagger reads one; leave it out"
        )
    if label is not None:
        raise UserError(
            f"--label-column: {label!r} cannot be compared here, since tags belong to words; leave "
            "it out, and have lmwright eval compare a source with use = 'eval' (docs/tags.md)"
        )


class TagTally(Tally):
    """Tally of texts whose words are tagged."""

    def __init__(self, labels: Sequence[str]):
        super().__init__()
        self.labels = labels
        self.given: Counter = Counter()
        """Words by the tag that they were given; None for those without one."""

    def made(self, scores: Tagged) -> dict[str, Any]:
        """Words, their tags, and the probability of each tag; null for a word without one."""
        words, raw = scores
        best, most = raw.argmax(axis=-1).tolist(), softmax(raw).max(axis=-1).tolist()
        there = [not math.isnan(share) for share in most]
        return {
            "words": words,
            "tags": [self.labels[at] if ok else None for at, ok in zip(best, there, strict=True)],
            "scores": [
                float(f"{share:.6g}") if ok else None for share, ok in zip(most, there, strict=True)
            ],
        }

    def count(self, line: Mapping[str, Any]) -> None:
        """Counts the words of a text."""
        self.given.update(line["tags"])

    def counts(self) -> str:
        """Counts of words by their tag, as text."""
        named = [f"{self.given[label]:,} {label}" for label in self.labels if self.given[label]]
        named += [f"{self.given[None]:,} without a tag"] if self.given[None] else []
        return f"{self.given.total():,} words: {', '.join(named)}"
