"""Stragglers: hosts that take longer than the others before a step can start on their devices.

All hosts end a step together, so that step times say nothing. Each rank measures its own work:
waiting for rows, and handing them and the step to the devices. The leader compares the medians; no
device takes part.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

REMEMBERED = 32
LEAST = 8  # samples of each host
FACTOR = 3.0
LEAST_MS = 50.0
SHOWN = 3


@dataclass
class Stragglers:
    """Host-side work of the latest steps, by host."""

    times_ms: dict[int, deque[float]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    told: frozenset[int] = frozenset()

    def see(self, host: int, pulse: dict[str, Any]) -> None:
        """Takes a heartbeat."""
        step, work = pulse.get("step"), pulse.get("host_ms")
        if pulse.get("phase") != "step" or work is None or self.steps.get(host) == step:
            return
        self.steps[host] = step
        self.times_ms.setdefault(host, deque(maxlen=REMEMBERED)).append(work)

    def slow(self) -> list[tuple[int, float, float]]:
        """(host, its median, median of the others) in ms of those that are slow, worst first."""
        full = {host: t for host, t in self.times_ms.items() if len(t) >= LEAST}
        medians = {host: statistics.median(times) for host, times in full.items()}
        slow = []
        for host, own in medians.items():
            others = [value for other, value in medians.items() if other != host]
            usual = statistics.median(others) if others else own
            if own > max(FACTOR * usual, usual + LEAST_MS):
                slow.append((host, own, usual))
        return sorted(slow, key=lambda entry: -entry[1])[:SHOWN]

    def news(self) -> str | None:
        """A line once other hosts are slow than were told last."""
        slow = self.slow()
        hosts = frozenset(host for host, _, _ in slow)
        if hosts <= self.told:
            self.told = hosts
            return None
        self.told = hosts
        named = ", ".join(f"host {host}: {own:.0f} ms" for host, own, _ in slow)
        return f"slow hosts: {named} of work before each step; the others take {slow[0][2]:.0f} ms"
