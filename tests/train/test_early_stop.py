"""Early stopping by held-out losses, some of which are NaN."""

from math import nan

import pytest

from lmwright.train.early_stop import EarlyStop


@pytest.mark.parametrize(
    "losses, best, since_best",
    [
        ([3.0, 2.0, 2.5], 2.0, 1),
        ([nan, 3.0, 2.0], 2.0, 0),
        ([2.0, nan, 2.5, 2.4], 2.0, 3),
        ([nan, nan], None, 2),
    ],
)
def test_a_loss_that_is_no_number_is_never_the_best(losses, best, since_best):
    early = EarlyStop()
    for loss in losses:
        early.see(loss, 4)
    assert (early.best, early.since_best, early.stopped) == (best, since_best, False)
