"""Goodput: the share of a run's machine time that went into steps that counted.

    sessions.json --> |start|compile|step|input|evaluate|save|redone|   of all sessions together

A step that is done again after a fault counts once. Time between two sessions belongs to no
machine of the run: waiting in a queue, and at most half a minute that a killed session has not
written down.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SPENT = "spent"
WORDS = {
    "start": "starting and restoring",
    "compile": "compiling",
    "input": "waiting for input",
    "evaluate": "evaluating",
    "save": "saving",
    "redone": "steps done twice",
    "other": "the rest",
}


@dataclass(frozen=True)
class Goodput:
    """Seconds of all sessions of a run."""

    total_s: float
    """With a machine."""
    productive_s: float
    lost_s: dict[str, float]
    """By the keys of WORDS."""
    between_s: float
    """Between sessions, without a machine."""
    sessions: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.productive_s / self.total_s

    def text(self) -> str:
        """One line; losses below half a percent are left out."""
        parts = sorted(self.lost_s.items(), key=lambda item: -item[1])
        told = [
            f"{seconds / self.total_s:.0%} {WORDS[name]}"
            for name, seconds in parts
            if seconds / self.total_s >= 0.005
        ]
        return f"{self.share:.1%}" + (f" ({', '.join(told)})" if told else "")


def goodput(sessions: Sequence[dict[str, Any]]) -> Goodput | None:
    """Goodput of the sessions of a run, in their order; None where none has measured its parts."""
    measured = [entry for entry in sessions if isinstance(entry.get(SPENT), dict)]
    total = sum(_seconds(entry) for entry in measured)
    if not total:
        return None
    lost = dict.fromkeys(WORDS, 0.0)
    productive = between = 0.0
    for entry, after in zip(measured, [*measured[1:], None], strict=True):
        spent = {name: float(value) for name, value in entry[SPENT].items()}
        steps_s = spent.pop("step", 0.0)
        done = entry["last_step"] - entry["first_step"]
        again = 0
        if after is not None:
            again = min(max(entry["last_step"] - after["first_step"], 0), done)
            between += max(after["began"] - entry["began"] - _seconds(entry), 0.0)
        redone = steps_s * again / done if done else 0.0
        productive += steps_s - redone
        lost["redone"] += redone
        for name, seconds in spent.items():
            lost[name if name in lost else "other"] += seconds
        lost["other"] += max(_seconds(entry) - steps_s - sum(spent.values()), 0.0)
    return Goodput(total, productive, lost, between, len(measured))


def parse_sessions(data: bytes) -> list[dict[str, Any]]:
    """Sessions of a sessions.json; those that are damaged are left out."""
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError):
        return []
    needed = ("began", "seconds", "first_step", "last_step")
    return [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and all(_is_number(entry.get(name)) for name in needed)
    ]


def _seconds(entry: dict[str, Any]) -> float:
    return float(entry["seconds"])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e15
