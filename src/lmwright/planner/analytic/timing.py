"""Timing: the seconds of a step, by what they are spent on."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Timing:
    """Seconds of one step on one device, and where they go."""

    by_kind: Counter = field(default_factory=Counter)
    """They add up to `step_s`."""
    by_part: Counter = field(default_factory=Counter)
    """Products and attention by the part of the model."""
    hidden_s: float = 0.0
    """Collectives behind arithmetic."""
    host_bytes: float = 0.0
    """To and from the memory of the host."""

    @property
    def step_s(self) -> float:
        return sum(self.by_kind.values())

    def times(self, factor: float) -> "Timing":
        """The timing with every time multiplied by `factor`."""
        kinds, parts = (
            Counter({name: factor * seconds for name, seconds in counts.items()})
            for counts in (self.by_kind, self.by_part)
        )
        return Timing(kinds, parts, factor * self.hidden_s, self.host_bytes)

    def of(self, kinds: Collection[str]) -> "Timing":
        """The part of some kinds alone, and what is hidden."""
        chosen = Counter({name: self.by_kind[name] for name in kinds})
        return Timing(chosen, Counter(), self.hidden_s)

    def minus(self, other: "Timing") -> "Timing":
        """Difference of two timings; no time is negative."""
        kinds, parts = self.by_kind - other.by_kind, self.by_part - other.by_part
        return Timing(kinds, parts, self.hidden_s - other.hidden_s)

    def plus(self, other: "Timing") -> "Timing":
        """Sum of two timings."""
        kinds, parts = self.by_kind + other.by_kind, self.by_part + other.by_part
        hidden, moved = self.hidden_s + other.hidden_s, self.host_bytes + other.host_bytes
        return Timing(kinds, parts, hidden, moved)
