"""Later: what remains of a run of several adapters when some have done their steps."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.phases import Phase, phases_of
from lmwright.planner.units import memory_size, short_duration
from lmwright.program.lora import only


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


def later_of(run: Run, machine: Machine) -> list[Later]:
    """The phases that follow the first, by the analytic model. Raises UserError for one whose rows
    the machine cannot train."""
    later = []
    for phase in phases_of(run)[1:]:
        try:
            rest = Quick.of(only(run, phase.active), machine)
        except UserError as error:
            raise UserError(
                f"lora.adapters: from step {phase.start:,} on, without {', '.join(phase.ended)}, "
                f"{phase.rows} rows a step are left ({error}); change the steps or the rows of the "
                "adapters"
            ) from error
        later.append(Later(phase, rest.memory.peak, rest.step_s, rest.fits))
    return later


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
