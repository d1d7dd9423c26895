"""Goodput: the share of a run's machine time that went into steps that counted.

    sessions.json --> |start|compile|step|input|evaluate|save|redone|   of all sessions together

A step that is done again after a fault counts once. Time between two sessions belongs to no
machine of the run, and at most half a minute of it was not written down by a killed session. Of
slices it is known when they were there: then it counts as start-up, and the queue is apart.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from lmwright.report.ledger import LEDGER, SPENT, is_number
from lmwright.report.paid import Paid, paid

WORDS = {
    "start": "starting and restoring",
    "compile": "compiling",
    "input": "waiting for input",
    "evaluate": "evaluating",
    "save": "saving",
    "redone": "steps done twice",
    "other": "the rest",
}
NAMES = {"start": "start-up", "evaluate": "eval", "other": "rest"}


@dataclass(frozen=True)
class Goodput:
    """Seconds of all sessions of a run."""

    total_s: float
    """Seconds with a machine."""
    productive_s: float
    lost_s: dict[str, float]
    """Lost seconds by the keys of WORDS."""
    slices: Paid | None = None
    """Cost of slices; None where there was none."""

    @property
    def share(self) -> float:
        """Fraction of the time that was productive, from 0 to 1."""
        return self.productive_s / self.total_s

    def text(self) -> str:
        """The goodput as one line; losses below half a percent are left out."""
        parts = sorted(self.lost_s.items(), key=lambda item: -item[1])
        told = [
            f"{seconds / self.total_s:.0%} {WORDS[name]}"
            for name, seconds in parts
            if seconds / self.total_s >= 0.005
        ]
        return f"{self.share:.1%}" + (f" ({', '.join(told)})" if told else "")


def ledger(measured: Goodput) -> dict[str, str]:
    """Uses of the time, and their cost: labels and texts in display order."""
    parts = {"productive": measured.productive_s}
    parts |= {NAMES.get(name, name): seconds for name, seconds in measured.lost_s.items()}
    rows = {
        name: f"{_hours(seconds)} ({seconds / measured.total_s:.1%})"
        for name, seconds in parts.items()
    }
    if (slices := measured.slices) is not None:
        rows["queue"] = f"{_hours(slices.queue_s)} without a machine"
    rows |= {"in all": _hours(measured.total_s), "goodput": f"{measured.share:.1%}"}
    if slices is not None:
        used = slices.chip_hours
        rows["chip-hours"] = f"{used:,.0f}" if used >= 100 else f"{used:.3g}"
        rows["cost"] = f"{slices.cost:,.2f} USD by the list"
    return rows


def goodput(sessions: Sequence[dict[str, Any]]) -> Goodput | None:
    """Goodput of the sessions of a run, in their order; None where none has measured its parts."""
    measured = [entry for entry in sessions if isinstance(entry.get(SPENT), dict)]
    total = sum(_seconds(entry) for entry in measured)
    if not total:
        return None
    lost = dict.fromkeys(WORDS, 0.0)
    productive = 0.0
    # the earliest step that any later session began with: a damaged save leads further back
    firsts = [*accumulate((entry["first_step"] for entry in reversed(measured)), min)][::-1]
    for entry, after in zip(measured, [*firsts[1:], None], strict=True):
        spent = {name: float(value) for name, value in entry[SPENT].items()}
        steps_s = spent.pop("step", 0.0)
        done = entry["last_step"] - entry["first_step"]
        again = 0
        if after is not None:
            again = min(max(entry["last_step"] - after, 0), done)
        redone = steps_s * again / done if done else 0.0
        productive += steps_s - redone
        lost["redone"] += redone
        for name, seconds in spent.items():
            lost[name if name in lost else "other"] += seconds
        lost["other"] += max(_seconds(entry) - steps_s - sum(spent.values()), 0.0)
    if (slices := paid(measured)) is not None:  # also without a session
        idle = slices.seconds - slices.training_s
        lost["start"] += idle
        total += idle
    return Goodput(total, productive, lost, slices)


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """Sessions of a run directory; none where nothing was written down."""
    try:
        return parse_sessions((folder / LEDGER).read_bytes())
    except FileNotFoundError:
        return []


def parse_sessions(data: bytes) -> list[dict[str, Any]]:
    """Sessions of a sessions.json; those that are damaged are left out, and so is what one is said
    to have spent where that is damaged."""
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError):
        return []
    needed = ("began", "seconds", "first_step", "last_step")
    sessions = [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and all(is_number(entry.get(name)) for name in needed)
    ]
    for entry in sessions:
        spent = entry.get(SPENT)
        if not (isinstance(spent, dict) and all(map(is_number, spent.values()))):
            entry.pop(SPENT, None)
    return sessions


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 360 else f"{seconds:,.1f} s"


def _seconds(entry: dict[str, Any]) -> float:
    return float(entry["seconds"])
