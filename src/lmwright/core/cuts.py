"""Cuts of layers in no regular order: into as few places as can be, whatever the order."""

from itertools import count
from typing import Any

Cuts = list[tuple[tuple[Any, ...], int]]


def fewest(kinds: tuple[Any, ...], longest: int) -> Cuts:
    """Patterns of at most `longest` kinds and how often each repeats, one behind the other; of the
    ways with the fewest places, one with few patterns."""
    best: list[tuple[int, int, Cuts]] = [(0, 0, [])]  # of the first layers: places, patterns, cuts
    for end in range(1, len(kinds) + 1):
        ways = []
        for length in range(1, min(longest, end) + 1):
            pattern = kinds[end - length : end]
            for repeats in count(1):
                start = end - length * repeats
                if start < 0 or kinds[start : start + length] != pattern:
                    break
                if length == 1 or repeats > 1:
                    places, patterns, cuts = best[start]
                    ways.append((places + length, patterns + 1, [*cuts, (pattern, repeats)]))
        best.append(min(ways, key=lambda way: way[:2]))
    return best[-1][2]
