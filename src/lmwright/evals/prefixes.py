"""Beginnings that many contexts have in common, such as the same solved examples.

sorted contexts --common with the next one--> nested intervals --most tokens saved--> groups
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lmwright.data.text.beginning import shared_length

SHORTEST = 64  # tokens of a common beginning that are worth a cache of their own

Ids = tuple[int, ...]


@dataclass
class _Interval:
    """Sorted contexts from `left` on whose first `length` tokens are equal."""

    length: int
    left: int
    saved: int = 0
    """Tokens that the best choice inside of it need not be read again."""
    chosen: list[tuple[int, int, int]] = field(default_factory=list)
    """That choice: first and last context, and tokens in common."""


def common_prefixes(contexts: Sequence[Ids]) -> list[tuple[int, list[Ids]]]:
    """Groups of different contexts, and the number of tokens at the beginning that each group
    has in common: 0 for those left over. At least one token of each context is behind them. Of
    groups inside of groups, those that save the most tokens are taken."""
    ordered = sorted(contexts)
    groups, rest, done = [], [], 0
    for first, last, length in _chosen(ordered):
        rest += ordered[done:first]
        groups.append((length, ordered[first : last + 1]))
        done = last + 1
    rest += ordered[done:]
    return [*groups, *([(0, rest)] if rest else [])]


def _chosen(ordered: Sequence[Ids]) -> list[tuple[int, int, int]]:
    """Intervals of sorted contexts that do not overlap, in their order, by the usual stack."""
    open_ones = [_Interval(0, 0)]
    for i in range(1, len(ordered) + 1):
        common = shared_length(ordered[i - 1], ordered[i]) if i < len(ordered) else 0
        left = i - 1
        while open_ones[-1].length > common:
            closed = _closed(open_ones.pop(), i - 1, ordered)
            left = closed.left
            if open_ones[-1].length < common:
                open_ones.append(_Interval(common, left))
            open_ones[-1].saved += closed.saved
            open_ones[-1].chosen += closed.chosen
        if open_ones[-1].length < common:
            open_ones.append(_Interval(common, left))
    return open_ones[0].chosen


def _closed(interval: _Interval, last: int, ordered: Sequence[Ids]) -> _Interval:
    """The interval up to the context `last`, with the better of the two choices: itself, or those
    inside of it."""
    length = min(interval.length, len(ordered[interval.left]) - 1)  # one token is left of each
    saved = length * (last - interval.left)
    if length >= SHORTEST and saved >= interval.saved:
        interval.saved, interval.chosen = saved, [(interval.left, last, length)]
    return interval
