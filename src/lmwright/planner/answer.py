"""Options of `lmwright plan`, and its answer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmwright.errors import EXIT_INTERRUPTED
from lmwright.planner.analytic.tensors import Tensor
from lmwright.planner.report import Report

EXIT_DOES_NOT_FIT = 1


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of `lmwright plan`."""

    on: str | None = None
    """A machine, or `any`; the machine of a measured run if its env.json does not say."""
    out: str | None = None
    """Folder of plan.json and plan.html."""
    quick: bool = False
    """Gives the analytic answer."""
    search: bool = False
    longest: bool = False
    """Finds the longest rows that fit."""
    finalists: int | None = None
    """Candidates of a search, or options of `longest`, that the compiler sees."""
    price: float | None = None
    """USD per chip-hour, of every machine."""
    hours: float | None = None
    """Length of one session."""
    json: bool = False
    """Prints JSON instead of text."""
    measured: bool = False
    """Compares a run that happened with its prediction."""
    keep: bool = False
    """Keeps the factor between the two, for later predictions on that machine."""
    forget: bool = False
    """Removes the stored factor."""


@dataclass(frozen=True)
class Answer:
    """Printed answer and exit code."""

    lines: list[str]
    json: str
    fits: bool
    stopped: bool = False
    tensors: Sequence[Tensor] = ()
    report: Report | None = None
    """Report of the compiler, whose program is drawn in plan.html."""
    notes: Sequence[str] = ()
    """Lines about what was chosen for the run and the machine."""

    def __str__(self) -> str:
        return "\n".join([*self.notes, *([""] if self.notes else ()), *self.lines])

    @property
    def figures(self) -> dict[str, Any]:
        """The numbers of the answer, as `plan --json` prints them."""
        return json.loads(self.json)

    @property
    def code(self) -> int:
        if self.stopped:
            return EXIT_INTERRUPTED
        return 0 if self.fits else EXIT_DOES_NOT_FIT
