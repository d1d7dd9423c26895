"""Common beginnings of contexts, by trying all intervals of sorted ones."""

import random

from lmwright.evals import prefixes
from lmwright.evals.prefixes import common_prefixes


def common_tokens(one, other):
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def saved(groups):
    return sum(length * (len(group) - 1) for length, group in groups)


def best(ordered, shortest):
    """Most tokens that intervals without overlap save, of those that nothing longer begins."""
    most = [0] * (len(ordered) + 1)
    for end in range(1, len(ordered) + 1):
        most[end] = most[end - 1]
        for start in range(end - 1):
            group = ordered[start:end]
            common = min(common_tokens(group[0], each) for each in group)
            common = min(common, *(len(each) - 1 for each in group))
            around = ordered[max(start - 1, 0) : start] + ordered[end : end + 1]
            whole = all(common_tokens(group[0], each) < common for each in around)
            if whole and common >= shortest:
                most[end] = max(most[end], most[start] + common * (end - start - 1))
    return most[-1]


def test_against_all_intervals(monkeypatch):
    monkeypatch.setattr(prefixes, "SHORTEST", 2)
    rng = random.Random(0)
    for _ in range(500):
        sizes = range(rng.randint(1, 10))
        contexts = list({tuple(rng.choices(range(2), k=rng.randint(5, 9))) for _ in sizes})
        groups = common_prefixes(contexts)
        assert sorted(each for _, group in groups for each in group) == sorted(contexts)
        for length, group in groups:
            assert all(each[:length] == group[0][:length] for each in group)
            assert all(len(each) > length for each in group)
        assert saved(groups) >= best(sorted(contexts), 2)


def test_subjects_with_one_head_and_examples_of_their_own():
    head, examples = tuple(range(70)), [tuple(range(100 * k, 100 * k + 90)) for k in (1, 2)]
    contexts = [(*head, *own, 7, number) for own in examples for number in range(5)]
    assert [(length, len(group)) for length, group in common_prefixes(contexts)] == [(161, 5)] * 2
    few = [(*head, number) for number in range(4)] + [(1, 2, 3)]
    assert [(length, len(group)) for length, group in common_prefixes(few)] == [(70, 4), (0, 1)]
