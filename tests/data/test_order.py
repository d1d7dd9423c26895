"""The order of training: a permutation each epoch, weights kept, the same however it is asked."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmwright.config import run
from lmwright.config.check_data import check_data
from lmwright.data.rows.order import Order, permute
from lmwright.errors import UserError

sizes = st.lists(st.integers(1, 60), min_size=1, max_size=5)
seeds = st.integers(0, 2**64 - 1)
blocks = st.integers(1, 40)
quick = settings(max_examples=50, deadline=None)


@st.composite
def weighted(draw):
    rows = draw(sizes.filter(lambda s: len(s) > 1))
    weights = [draw(st.one_of(st.none(), st.floats(0.01, 50))) for _ in rows]
    weights[0], weights[1] = draw(st.floats(0.01, 50)), draw(st.floats(0.01, 50))
    return rows, weights


def pairs(order, start, stop):
    return list(zip(*(x.tolist() for x in order.rows(start, stop)), strict=True))


@quick
@given(sizes, seeds, blocks, st.integers(0, 5))
def test_each_epoch_of_unweighted_sources_is_a_permutation(rows, seed, block, epoch):
    order = Order(rows, seed=seed, block_rows=block)
    total = sum(rows)
    seen = pairs(order, epoch * total, (epoch + 1) * total)
    assert sorted(seen) == [(s, r) for s, n in enumerate(rows) for r in range(n)]


@quick
@given(weighted(), seeds, blocks)
def test_at_the_end_of_every_block_a_sources_rows_came_equally_often(case, seed, block):
    rows, weights = case
    order = Order(rows, weights, seed, block)
    total = sum(rows)
    counts = [[0] * n for n in rows]
    for epoch in range(3):
        for start in range(0, total, block):
            stop = min(start + block, total)
            for source, row in pairs(order, epoch * total + start, epoch * total + stop):
                counts[source][row] += 1
            assert all(max(c) - min(c) <= 1 for c in counts)


@quick
@given(weighted(), seeds, blocks)
def test_weights_hold_within_a_row_and_walks_never_repeat(case, seed, block):
    rows, weights = case
    order = Order(rows, weights, seed, block)
    total, epochs = sum(rows), 3
    seen = pairs(order, 0, epochs * total)
    pool = sum(n for n, w in zip(rows, weights, strict=True) if w is not None)
    mass = sum(Fraction(w) for w in weights if w is not None)
    for source, (n, w) in enumerate(zip(rows, weights, strict=True)):
        share = n if w is None else Fraction(w) / mass * pool
        for epoch in range(epochs):
            part = seen[epoch * total : (epoch + 1) * total]
            assert abs(sum(s == source for s, _ in part) - share) < 1
        # every pass over a source shows each row once, also across epochs; within a block
        # rows are shuffled, so counts may differ by what one block can hold at its edge
        counts = Counter(r for s, r in seen if s == source)
        drawn = sum(counts.values())
        assert max(counts.values(), default=0) <= -(-drawn // n)
        assert min(counts.get(r, 0) for r in range(n)) >= drawn // n


@quick
@given(weighted(), seeds, blocks, st.data())
def test_chunks_join(case, seed, block, data):
    order = Order(*case, seed, block)
    total = sum(case[0])
    cuts = sorted(data.draw(st.lists(st.integers(0, 3 * total), min_size=3, max_size=6)))
    whole = pairs(Order(*case, seed, block), cuts[0], cuts[-1])
    joined = [p for a, b in pairwise(cuts) for p in pairs(order, a, b)]
    assert joined == whole


@quick
@given(weighted(), st.data())
def test_sources_are_spread_evenly(case, data):
    """After any x rows of an epoch each source has its share, up to a fraction of a round."""
    order = Order(*case)
    total, count = order.epoch_rows, len(case[0])
    x = data.draw(st.integers(0, total))
    drawn = order.drawn(x)
    assert sum(drawn) == x
    for q, d in zip(order.quotas, drawn, strict=True):
        assert abs(d - x * q / total) <= count / 2 * q / total + 0.5 + 1e-9
    if x < total:
        step = np.subtract(order.drawn(x + 1), drawn)
        assert sorted(step) == [0] * (count - 1) + [1]


@pytest.mark.parametrize("block", [1, 7, 64])
def test_walks_of_weighted_sources_go_on_across_epochs(block):
    """At the end of each block of three epochs a source's rows came equally often, give or take
    one; so one starts anew only when all were seen."""
    order = Order([7, 30, 9], [5.0, 2.0, None], 4, block)
    assert order.quotas == (26, 11, 9)  # 37 rows by five and two sevenths: 26.4 and 10.6
    counts = [[0] * n for n in order.rows_per_source]
    for epoch in range(3):
        for start in range(0, 46, block):
            stop = min(start + block, 46)
            for source, row in pairs(order, epoch * 46 + start, epoch * 46 + stop):
                counts[source][row] += 1
            assert all(max(c) - min(c) <= 1 for c in counts)
    assert [sum(c) for c in counts] == [78, 33, 27]


def test_rows_that_are_left_go_to_the_largest_remainders():
    """Hamilton's method: 4.7, 1.6 and 3.7 of ten rows are 5, 1 and 4."""
    assert Order([4, 3, 3], [0.47, 0.16, 0.37]).quotas == (5, 1, 4)


def brute_force_rows(order, epoch):
    """The documented order, written the slow way: every draw of an epoch sorted by its time."""
    m = order.epoch_rows
    times = sorted(
        (Fraction((2 * k + 1) * m, 2 * q), i) for i, q in enumerate(order.quotas) for k in range(q)
    )
    return [
        Counter(i for _, i in times[a : a + order.block_rows])
        for a in range(0, m, order.block_rows)
    ]


@quick
@given(weighted(), seeds, blocks)
def test_blocks_hold_what_sorting_all_draws_gives(case, seed, block):
    order = Order(*case, seed, block)
    expected = brute_force_rows(order, 1)
    m = order.epoch_rows
    for number, counts in enumerate(expected):
        start = m + number * block
        sources, _ = order.rows(start, min(start + block, 2 * m))
        assert Counter(sources.tolist()) == counts


@quick
@given(seeds)
def test_epochs_and_seeds_differ(seed):
    order = Order([40, 25], seed=seed, block_rows=16)
    epochs = [pairs(order, e * 65, (e + 1) * 65) for e in range(4)]
    other = pairs(Order([40, 25], seed=seed ^ 1, block_rows=16), 0, 65)
    assert len({tuple(e) for e in [*epochs, other]}) == 5
    # another membership of the first block, not only another order within it
    assert len({frozenset(e[:16]) for e in epochs}) == 4


@quick
@given(st.integers(1, 3000), seeds)
def test_permute_is_a_bijection(n, key):
    out = permute(np.arange(n), np.full(n, n), np.full(n, key, np.uint64))
    assert np.array_equal(np.sort(out), np.arange(n))


def test_permutations_are_close_to_uniform():
    """All 24 orders of four rows, and all pairs of (place, row) of 50, come about equally often."""
    keys = np.repeat(np.arange(24_000, dtype=np.uint64), 4)
    out = permute(np.tile(np.arange(4), 24_000), np.full(96_000, 4), keys).reshape(-1, 4)
    counts = np.array(list(Counter(map(tuple, out.tolist())).values()))
    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 60  # chi-square, 23 degrees: p < 1e-4
    keys = np.repeat(np.arange(5_000, dtype=np.uint64), 50)
    places = np.tile(np.arange(50), 5_000)
    out = permute(places, np.full(250_000, 50), keys)
    table = np.zeros((50, 50))
    np.add.at(table, (places, out), 1)
    chi = ((table - 100) ** 2 / 100).sum()
    assert abs(chi - 49 * 49) < 5 * np.sqrt(2 * 49 * 49)


def test_large_stores_have_random_access():
    order = Order([10**11, 3 * 10**10 + 7], [1.0, 2.0], seed=5)
    sources, rows = order.rows(7 * order.epoch_rows - 50, 7 * order.epoch_rows + 50)
    assert len(set(zip(sources.tolist(), rows.tolist(), strict=True))) == 100
    assert rows[sources == 0].max() > 10**10 and rows.min() >= 0
    assert abs(np.mean(sources == 1) - 2 / 3) < 0.1


def test_order_is_pinned():
    """Any change of these figures breaks resumed runs: it needs a new store format."""
    sources, rows = Order([1000, 300, 5000], [1.0, 3.0, None], 11, 256).rows(6290, 6302)
    assert sources.tolist() == PINNED[0]
    assert rows.tolist() == PINNED[1]


PINNED = (
    [2, 2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2],
    [529, 923, 2723, 4344, 221, 1203, 3335, 3728, 176, 712, 3444, 2355],
)


def test_sequential():
    order = Order([3, 2], kind="sequential", seed=9)
    assert pairs(order, 3, 8) == [(1, 0), (1, 1), (0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(
    "rows, weights, kind, says",
    [
        ([0, 0], None, "shuffled", "no source has any rows"),
        ([3, 4], [1.0, None], "shuffled", "at least two"),
        ([3, 0], [1.0, 2.0], "shuffled", "weighted source is empty"),
        ([3, 4], [1.0, 2.0], "sequential", "no effect"),
    ],
)
def test_refusals(rows, weights, kind, says):
    with pytest.raises(UserError, match=says):
        Order(rows, weights, kind=kind)


@pytest.mark.parametrize(
    "weights, order, says",
    [((2.0, None), "virtual", "a weight to at least two"), ((2.0,), "none", "no effect")],
)
def test_refusals_before_any_text_is_read(weights, order, says):
    sources = [run.Source(path=f"{n}.txt", weight=weight) for n, weight in enumerate(weights)]
    data = run.Data(dir="data", sources=tuple(sources), shuffle=run.Shuffle(order=order))
    with pytest.raises(UserError, match=says):
        check_data(data, seq_len=8)
    evaluated = run.Source(path="held.txt", use="eval")
    check_data(run.Data(dir="data", sources=(sources[0], evaluated)), seq_len=8)
