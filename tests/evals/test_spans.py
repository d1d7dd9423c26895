"""The likeliest spans of windows, against all of them in plain loops."""

import re

import numpy as np
import pytest

from lmwright.data.tokens.answers import Context, text_at, tokens_of
from lmwright.evals.spans import BEST, found_in

TEXT = " ".join(f"w{i}" for i in range(12))  # a token is a word with the blank before it
OFFSETS = np.array([[i.start() - (i.start() > 0), i.end()] for i in re.finditer(r"\S+", TEXT)])


def by_loops(windows, most):
    """({(start, stop): score}, score of no answer), as the pipeline of transformers 4 has them."""
    best, none = {}, 1.0
    for begin, head, logits in windows:
        kept = [0, *range(head, len(logits) - 1)]
        start, end = (np.exp(logits[kept, i]) / np.exp(logits[kept, i]).sum() for i in (0, 1))
        none = min(none, start[0] * end[0])
        for a in range(1, len(kept)):
            for b in range(a, min(len(kept), a + most)):
                span = text_at(TEXT, OFFSETS, begin + a - 1, begin + b - 1)
                best[span] = max(best.get(span, 0.0), start[a] * end[b])
    return best, none


@pytest.mark.parametrize("most", [1, 3, 30])
@pytest.mark.parametrize("room, starts", [(12, [0]), (5, [0, 3, 6, 9])])
def test_the_best_spans_of_all_windows(most, room, starts):
    rng = np.random.default_rng(most + room)
    made = Context([7, 7], list(range(12)), OFFSETS, starts, room, False, ())
    for _ in range(20):
        windows = [
            (begin, 4, rng.normal(size=(4 + made.stop(begin) - begin + 1, 2)) * 3)
            for begin in starts
        ]
        found = found_in(TEXT, made, windows, most)
        best, none = by_loops(windows, most)
        assert found.none == pytest.approx(none)
        wanted = sorted(best.items(), key=lambda item: -item[1])[:BEST]
        assert [(span.start, span.stop) for span in found.spans] == [span for span, _ in wanted]
        np.testing.assert_allclose([span.score for span in found.spans], [s for _, s in wanted])
        assert (found.best("allowed") is None) == (none > wanted[0][1])
        assert found.best("never") == found.spans[0]


def test_an_empty_context_has_no_answer():
    made = Context([7], [], np.zeros((0, 2), np.int64), [0], 5, False, ())
    found = found_in("", made, [(0, 2, np.zeros((3, 2)))], 30)
    assert found.spans == [] and found.best("never") is None and found.none == 1.0


@pytest.mark.parametrize(
    "start, stop, tokens, text",
    [
        (0, 2, (0, 0), "w0"), (1, 2, (0, 0), "w0"), (3, 5, (1, 1), "w1"), (4, 7, (1, 2), "w1 w2"),
        (2, 5, (1, 1), "w1"), (0, 8, (0, 2), "w0 w1 w2"),
    ],
)  # fmt: skip
def test_characters_are_widened_to_tokens(start, stop, tokens, text):
    assert tokens_of(OFFSETS, start, stop) == tokens
    a, b = text_at(TEXT, OFFSETS, *tokens)
    assert TEXT[a:b] == text
