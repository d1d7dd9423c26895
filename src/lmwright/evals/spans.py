"""Spans: the likeliest answers of a question in the windows of its context, as transformers'
pipeline chooses them.

    logits [T, 2] of a window --softmax over the first token and the context--> shares
    share that the answer starts at one token, times that it ends at another --> score of a span

No answer has the score of the first token, the smallest one of all windows.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lmwright.data.tokens.answers import Context, text_at
from lmwright.evals.tallies import softmax

BEST = 3  # answers that are listed
TRIED = 20  # spans of a window, of which several may be the same characters


class Span(NamedTuple):
    """Characters of a context, and the probability that they are the answer."""

    start: int
    stop: int
    score: float


class Found(NamedTuple):
    """The likeliest answers to a question."""

    spans: list[Span]
    """The likeliest answers, best first; none in an empty context."""
    none: float
    """Probability that it has no answer."""

    def best(self, no_answer: str) -> Span | None:
        """The answer; None where none is likelier, unless there has to be one."""
        if not self.spans or (no_answer == "allowed" and self.none > self.spans[0].score):
            return None
        return self.spans[0]


def found_in(
    context: str,
    encoded: Context,
    windows: Iterable[tuple[int, int, np.ndarray]],
    max_answer_tokens: int,
) -> Found:
    """The likeliest answers in a context. `windows` are the first token of the context in each, the
    place of that one, and its logits [tokens, 2]."""
    best: dict[tuple[int, int], float] = {}
    none = 1.0
    for begin, head, logits in windows:
        count = encoded.stop(begin) - begin
        kept = np.concatenate([[0], np.arange(head, head + count)])
        start, end = softmax(logits[kept, 0]), softmax(logits[kept, 1])
        none = min(none, float(start[0] * end[0]))
        for first, last, score in _likeliest(start[1:], end[1:], max_answer_tokens):
            span = text_at(context, encoded.offsets, begin + first, begin + last)
            if span[0] < span[1]:
                best[span] = max(score, best.get(span, 0.0))
    spans = [Span(*span, score) for span, score in best.items()]
    return Found(sorted(spans, key=lambda span: (-span.score, span.start, span.stop))[:BEST], none)


def _likeliest(start: np.ndarray, end: np.ndarray, most: int) -> list[tuple[int, int, float]]:
    """(first token, last one, score) of the best spans of at most so many tokens."""
    if not len(start):
        return []
    width = min(most, len(start))
    padded = np.concatenate([end, np.zeros(width - 1)])
    scores = start[:, None] * np.lib.stride_tricks.sliding_window_view(padded, width)
    flat = scores.ravel()
    top = np.argpartition(-flat, min(TRIED, len(flat)) - 1)[:TRIED]
    places = (divmod(int(at), width) for at in top)
    return [(first, first + more, float(scores[first, more])) for first, more in places
            if first + more < len(start)]  # fmt: skip


def answer_text(context: str, span: Span | None) -> str:
    """The answer as text; empty where there is none."""
    return "" if span is None else context[span.start : span.stop]


def flat_windows(contexts: Sequence[Context]) -> list[tuple[int, int]]:
    """(number of the question, first token of its context) of all windows, in order."""
    return [(number, begin) for number, each in enumerate(contexts) for begin in each.starts]
