"""The beginning that two texts, or two rows of ids, have in common."""

from collections.abc import Sequence
from typing import Any


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Number of leading characters, or ids, that are the same in both; whole slices are compared,
    which is faster than one after the other."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
