"""Advice: what bounds a step, and the change to the run that `planner.remedy` found for it.

seconds by kind, by part --> "bound by arithmetic (74% of the step, most of it mlp); ..."
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lmwright.planner.units import short_duration

BOUNDS = {
    "matmul": "arithmetic",
    "attention": "attention",
    "vector": "memory bandwidth",
    "memory": "memory bandwidth",
    "routing": "memory bandwidth",
    "exposed collectives": "collectives",
    "network": "the network between slices or nodes",
    "idle": "pipeline stages that wait",
}

MEMORY = "memory"
TIE_SHARE = 0.05
"""Relative difference below which step times are not told apart."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Resource that bounds a run, and changes to try."""

    bound: str
    share: float
    """Fraction of the step that goes to it; of the memory that is there where the run does not
    fit."""
    part: str
    """The part of the model or of the memory that takes most; empty where only products are known
    by part and they are not what bounds the run."""
    part_share: float
    overrides: tuple[str, ...] | None = None
    """The change to try; empty where none gains more than a tie, None where none was looked
    for."""
    changes_training: bool = False
    """True if another optimizer is part of the change."""
    harm: str = ""
    """Effect of the change on training: identical, identical but slower, different."""
    on: str | None = None
    """The machine to try, where it is another one."""
    step_s: float | None = None
    """Seconds of a step with that change, by the analytic model."""
    gain: float | None = None
    """Speedup of the step with it."""
    close: bool = False
    """True if the error of the analytic model could make it too large."""

    def to_json(self) -> dict:
        """The entry in plan.json."""
        return asdict(self)

    @property
    def text(self) -> str:
        """The advice in one sentence."""
        if self.bound == MEMORY:
            what = (
                f"bound by memory: it needs {self.share:.2f} times the available memory "
                f"({self.part_share:.0%} of that: {self.part})"
            )
        else:
            what = f"bound by {self.bound}: {self.share:.0%} of the step"
            if self.part and self.part != self.bound:
                what += f" ({self.part} is the largest part, {self.part_share:.0%})"
        if self.overrides is None:
            return what
        if not self.overrides and self.on is None:
            return (
                f"{what}; no other mesh, remat, number of microbatches or way to add up the head's "
                f"gradient is faster by more than {TIE_SHARE:.0%}, by --quick"
            )
        words = " ".join([*([f"--on {self.on}"] if self.on else []), *self.overrides])
        step = f"{short_duration(self.step_s)} a step"
        speed, mark = f"{step} by --quick", ""
        if self.gain:  # beside the compiler's time, --quick's own time for the run as it is
            now = short_duration(self.step_s * self.gain)
            speed = f"{self.gain:.2f} times as fast by --quick: {step} instead of {now}"
        if self.bound == MEMORY:  # of a larger machine, no harm is known
            speed = f"which fits, {step} by --quick"
            mark = "" if self.on else f" ({self.harm})"
        elif self.changes_training:
            mark = " (trains differently)"
        close = "; close, ask the compiler" if self.close else ""
        return f"{what}; to try: {words}{mark}, {speed}{close}"


def bound_of(by_kind: Mapping[str, float], by_part: Mapping[str, float]) -> Advice:
    """Resource that bounds a step, by the seconds of each kind of work and part of the model."""
    bounds: dict[str, float] = {}
    for kind, seconds in by_kind.items():
        name = BOUNDS.get(kind, kind)
        bounds[name] = bounds.get(name, 0.0) + seconds
    whole = sum(bounds.values()) or 1.0
    bound = max(bounds, key=bounds.get)
    whole_known = sum(by_part.values()) > 0.99 * whole
    named = by_part and (whole_known or bound in (BOUNDS["matmul"], BOUNDS["attention"]))
    part = max(by_part, key=by_part.get) if named else ""
    return Advice(
        bound=bound,
        share=bounds[bound] / whole,
        part=part,
        part_share=by_part.get(part, 0.0) / whole,
    )
