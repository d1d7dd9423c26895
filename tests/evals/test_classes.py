"""Scores of classifiers, against values worked out by hand and definitions in other forms."""

import math

import numpy as np
import pytest

from lmwright.evals.classes import Scores


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
