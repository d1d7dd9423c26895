"""Intervals of keys against masks of all pairs, by segment ids and distances."""

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.contract import seen_keys
from lmwright.nn import attention, intervals
from lmwright.nn.attention import Scoring
from tests.kernels.attention_problem import problem

IDS = np.array([[1] * 5 + [2] * 1 + [3] * 9 + [0] * 3, [0] * 4 + [1] * 14, [7] * 18])
PLACE = np.arange(IDS.shape[1])
BACK = PLACE[:, None] - PLACE  # tokens that a key is behind a query
SAME = IDS[:, :, None] == IDS[:, None, :]
FIRST = np.array([[list(row).index(one) for one in row] for row in IDS])
BLOCK = (PLACE - FIRST) // 4


def num_scores(seen):
    """Scores of each row, by the widths of its intervals."""
    return np.maximum(seen.end - seen.start, 0).sum(-1)


@pytest.mark.parametrize(
    ("seen", "mask"),
    [
        (intervals.causal(IDS), SAME & (BACK >= 0)),
        (intervals.causal(IDS, 1), SAME & (BACK == 0)),
        (intervals.causal(IDS, 4), SAME & (BACK >= 0) & (BACK < 4)),
        (intervals.both_ways(IDS), SAME),
        (intervals.both_ways(IDS, 3), SAME & (np.abs(BACK) <= 3)),
        (intervals.blocks(IDS, 4), SAME & (BLOCK[:, :, None] >= BLOCK[:, None, :])),
    ],
)
def test_masks_and_work(seen, mask):
    np.testing.assert_array_equal(seen.mask(IDS.shape[1]), mask)
    np.testing.assert_array_equal(num_scores(seen), mask.sum((1, 2)))


@pytest.mark.parametrize("window", [None, 5, 40, 99])
def test_flops_count_the_same_work(window):
    """By a formula that takes the diagonal for half a key, or leaves it out."""
    (scores,) = num_scores(intervals.causal(jnp.ones((1, 64), jnp.int32), window))
    assert scores / 64 == pytest.approx(seen_keys(window, 64), abs=0.5)


def test_the_causal_reference_is_that_of_intervals():
    q, k, v, ids, _ = problem(2, 30, 6, 2, 5)
    scoring = Scoring(0.3, 7, 0.9)
    got = intervals.attention(q, k, v, intervals.causal(ids, scoring.window), scoring)
    np.testing.assert_array_equal(got, attention.causal_attention(q, k, v, ids, scoring))


def test_a_query_that_sees_no_key_gives_zeros():
    q, k, v, ids, _ = problem(2, 30, 6, 2, 5)
    start, end = intervals.causal(ids)
    seen = intervals.Interval(start, jnp.where(ids > 0, end, start))
    got = intervals.attention(q, k, v, seen, Scoring(0.3))
    np.testing.assert_array_equal(jnp.abs(got).max((2, 3)) > 0, ids > 0)
