"""SQuAD's scores: cases worked out by hand by the rules of its script."""

import pytest

from lmwright.evals.squad import scores_of

CASES = [
    # given, right answers, exact match, F1
    ("Ada Lovelace", ["Ada Lovelace"], 1, 1),
    ("the Ada, Lovelace!", ["ada lovelace"], 1, 1),  # articles, punctuation, case, blanks
    ("  An  owl\tsat ", ["owl sat"], 1, 1),
    ("theory", ["theory of a the"], 0, 2 / 3),  # a word that begins with an article stays
    ("ory", ["theory"], 0, 0),
    ("don't", ["dont"], 1, 1),  # punctuation leaves no blank
    ("New-York", ["New York"], 0, 0),
    ("1,000", ["1000"], 1, 1),
    ("the cat on the mat", ["a cat"], 0, 2 * (1 / 3) * 1 / (1 / 3 + 1)),
    ("cat cat dog", ["cat cat cat"], 0, 2 / 3),  # words count as often as both have them
    ("in 1990", ["1990", "the year 1990"], 0, 2 / 3),  # the best of each score
    ("year 1990", ["1990", "the year 1990"], 1, 1),
    ("", [], 1, 1),  # no answer, rightly
    ("cat", [], 0, 0),
    ("", ["cat"], 0, 0),
    ("the", [], 1, 1),  # nothing is left of it
    ("the", ["cat"], 0, 0),
    ("", ["The", "cat"], 0, 0),  # a right answer of articles alone does not count
    ("cat", ["The", "cat"], 1, 1),
    ("", ["The"], 1, 1),  # unless there is no other
    ("\u201ccat\u201d", ["cat"], 0, 0),  # only ASCII punctuation is left out
    ("\u00c9COLE", ["\u00e9cole"], 1, 1),
]


@pytest.mark.parametrize("given, right, exact, f1", CASES)
def test_scores(given, right, exact, f1):
    assert scores_of(given, right) == (exact, pytest.approx(f1))
