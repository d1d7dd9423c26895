"""Phases: what a run of several adapters becomes as they end, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmwright.config.run import Run
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


def tokens_until(phases: Sequence[Phase], step: int, tokens_per_step: int) -> int:
    """Tokens of a run's steps up to this one; a step of the first phase has `tokens_per_step`."""
    rows = sum(p.rows * (min(p.stop, step) - p.start) for p in phases if p.start < step)
    return rows * tokens_per_step // phases[0].rows
