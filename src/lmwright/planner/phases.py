"""Phases: what a run of several adapters becomes as they end, one after the other."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lmwright.config.run import Run
from lmwright.planner.units import memory_size, short_duration
from lmwright.program.trainee import Trainee, training_of


@dataclass(frozen=True)
class Phase:
    """Steps of a run in which the same trainees train; one that has done its steps leaves."""

    start: int
    stop: int
    active: tuple[Trainee, ...]
    ended: tuple[str, ...]
    """Trainees that have left since the phase before."""

    @property
    def rows(self) -> int:
        """Rows of each step."""
        return sum(t.rows for t in self.active)


def phases_of(run: Run) -> tuple[Phase, ...]:
    """The phases of a run in which every trainee does all of its steps."""
    trainees = training_of(run).trainees
    phases, start, left = [], 0, trainees
    while left:
        stop, before = min(t.steps for t in left), start
        ended = tuple(t.name for t in trainees if t.steps == before and before)
        phases.append(Phase(start, stop, tuple(left), ended))
        start, left = stop, tuple(t for t in left if t.steps > stop)
    return tuple(phases)


@dataclass(frozen=True)
class Later:
    """The program that remains when trainees have done their steps."""

    phase: Phase
    peak_bytes: float
    step_s: float | None
    """None where it does not fit."""
    fits: bool

    def line(self) -> str:
        """One line of the report."""
        speed = "does not fit" if self.step_s is None else f"{short_duration(self.step_s)} a step"
        return (
            f"from step {self.phase.start:,}, without {', '.join(self.phase.ended)}: "
            f"{memory_size(self.peak_bytes)}, {speed}"
        )


def mean_step_s(first_s: float, later: Sequence[Later]) -> float:
    """Mean seconds of a step over the run, whose first phase takes `first_s`."""
    if not later:
        return first_s
    total = first_s * later[0].phase.start
    total += sum((p.phase.stop - p.phase.start) * (p.step_s or first_s) for p in later)
    return total / later[-1].phase.stop


def with_later(text: str, later: Sequence[Later]) -> str:
    """A report's JSON with the phases that follow the first, in bytes and seconds."""
    rows = [
        {
            "start": part.phase.start,
            "stop": part.phase.stop,
            "trainees": [trainee.name for trainee in part.phase.active],
            "fits": part.fits,
            "peak_bytes": part.peak_bytes,
            "step_s": part.step_s,
        }
        for part in later
    ]
    return json.dumps(json.loads(text) | {"later": rows}, indent=1) if rows else text
