"""Draw: chooses the parts of a stage to make, where results of some decide which others are needed.

counts of the finished parts --next--> the part to make now, until there is none --used--> all
                                                                          that the stage is of
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

Done = Mapping[int, dict[str, Any]]
"""Counts of finished parts, by number."""


class Draw(Protocol):
    """Choice of parts. The result depends on the parts alone, never on the order in which they
    ended."""

    def next(self, done: Done, running: Set[int]) -> tuple[int, Any] | None:
        """Number and input of the next part to make while others run; it may be a finished part
        whose input has changed. None if nothing can start before a running part ends."""

    def used(self, done: Done) -> list[int]:
        """Parts that the stage is made of, ascending, after `next` is None and none is running."""

    def expected(self, done: Done) -> int:
        """Number of parts that are made in the end, as far as is known."""

    def left(self, done: Done) -> int:
        """Number of parts that may still be made, at most."""


class Fixed:
    """Choice of all parts, or of those with the given numbers."""

    def __init__(self, parts: Sequence[Any], numbers: Iterable[int] | None = None):
        self._parts = parts
        self._numbers = list(range(len(parts)) if numbers is None else numbers)
        self._waiting = iter(self._numbers)

    def next(self, done: Done, running: Set[int]) -> tuple[int, Any] | None:
        """The first part that is neither finished nor running. Parts are handed out once."""
        number = next((i for i in self._waiting if i not in done and i not in running), None)
        return None if number is None else (number, self._parts[number])

    def used(self, done: Done) -> list[int]:
        return self._numbers

    def expected(self, done: Done) -> int:
        return len(self._numbers)

    def left(self, done: Done) -> int:
        return sum(number not in done for number in self._numbers)
