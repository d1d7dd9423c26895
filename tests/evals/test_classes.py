"""Scores of classifiers, against values worked out by hand and definitions in other forms."""

import math

import numpy as np
import pytest

from lmwright.evals.classes import Scores
from lmwright.evals.tallies import ClassTally


def test_two_classes_by_hand():
    """6 true and 1 false positives, 3 true and 2 false negatives."""
    scores = Scores.of(np.array([[3, 1], [2, 6]]))
    assert scores.accuracy == pytest.approx(9 / 12)
    assert scores.majority == pytest.approx(8 / 12)
    assert scores.precision == pytest.approx((3 / 5, 6 / 7))
    assert scores.recall == pytest.approx((3 / 4, 6 / 8))
    assert scores.f1 == pytest.approx((6 / 9, 12 / 15))
    assert scores.macro_f1 == pytest.approx((6 / 9 + 12 / 15) / 2)
    # the textbook's formula for two classes
    wanted = (6 * 3 - 1 * 2) / math.sqrt((6 + 1) * (6 + 2) * (3 + 1) * (3 + 2))
    assert scores.matthews == pytest.approx(wanted)


def test_matthews_is_the_correlation_of_indicators():
    """Its definition: covariance of one-hot classes over the root of both variances."""
    rng = np.random.default_rng(3)
    confusion = rng.integers(0, 20, (5, 5))
    real, given = (np.repeat(i, confusion.ravel()) for i in np.indices((5, 5)).reshape(2, -1))
    x, y = (np.eye(5)[each] - np.eye(5)[each].mean(0) for each in (real, given))
    wanted = np.sum(x * y) / np.sqrt(np.sum(x * x) * np.sum(y * y))
    assert Scores.of(confusion).matthews == pytest.approx(wanted)


def test_classes_that_never_occur():
    """They have no say in the macro F1; one class alone has no correlation."""
    scores = Scores.of(np.array([[4, 0, 0], [0, 0, 0], [0, 0, 0]]))
    assert (scores.accuracy, scores.macro_f1, scores.matthews) == (1.0, 1.0, 0.0)
    assert Scores.of(np.array([[3, 1, 0], [0, 0, 0], [0, 0, 0]])).macro_f1 == pytest.approx(3 / 7)
    assert Scores.of(np.zeros((2, 2))).accuracy == 0.0


def test_a_file_is_counted_by_the_labels_that_its_texts_have():
    """Three of cat, of which one is taken for a dog and one was cut, a dog, and one unknown."""
    tally = ClassTally(("cat", "dog"))
    shares = [("cat", 0.9), ("cat", 0.6), ("cat", 0.25), ("dog", 0.2), (None, 0.3)]
    for number, (real, cat) in enumerate(shares):
        scores = np.log([cat, 1 - cat])
        line = {"id": f"row {number}"} | tally.made(scores)
        line |= {} if real is None else {"expected": real}
        tally.add(line | ({"cut": 9} if number == 1 else {}))
    tally.add({"id": "row 5", "error": "no text"})
    found = tally.loss("file")
    assert found.confusion.tolist() == [[2, 1], [0, 1]]  # rows are what texts are
    assert (found.accuracy, found.tokens) == (3 / 4, 4)
    wanted = -np.mean(np.log([0.9, 0.6, 0.25, 0.8]))
    assert found.loss == pytest.approx(wanted, rel=1e-5)
    assert tally.line(9) == "5 texts: 2 cat, 3 dog; 1 cut to 9 tokens; 1 rows without a text"
    assert "row 2, cat at 25.00%, was given dog" in tally.worst[0][1]
