"""Fit: what a recipe, a preset or the dial gave to a longer run, shortened for a short one.

Only such values: what the run file or the command line says is refused where it does not fit.
"""

from typing import Any

from lmwright.config.merge import Merged
from lmwright.config.text import Keys

GIVEN = ("recipe ", "preset ", "depth ")
SHARE = 10  # a fitted warm-up is a tenth of the run
SCHEDULE: Keys = ("optim", "schedule")


def fit_schedule(merged: Merged) -> list[str]:
    """Shortens a given warm-up, then a given decay, to `train.steps`; a line for each."""
    steps = _at(merged.values, ("train", "steps"))
    schedule = _at(merged.values, SCHEDULE)
    if type(steps) is not int or steps < 1 or not isinstance(schedule, dict):
        return []
    warmup, decay = (schedule.get(f"{name}_steps", 0) for name in ("warmup", "decay"))
    if type(warmup) is not int or type(decay) is not int or warmup + decay <= steps:
        return []
    lines = _put(merged, "warmup_steps", warmup, min(warmup, max(steps // SHARE, 1)), steps)
    left = max(steps - schedule.get("warmup_steps", 0), 0)
    return lines + _put(merged, "decay_steps", decay, min(decay, left), steps)


def _put(merged: Merged, name: str, value: int, fitted: int, steps: int) -> list[str]:
    keys: Keys = (*SCHEDULE, name)
    origin = merged.origin.get(keys, "")
    if fitted == value or not origin.startswith(GIVEN):
        return []
    _at(merged.values, SCHEDULE)[name] = fitted
    merged.origin[keys] = f"{origin}, fitted to train.steps"
    field = ".".join(map(str, keys))
    return [
        f"{field}: the {value} of {origin} do not fit into train.steps = {steps}; using {fitted}"
    ]


def _at(values: Any, keys: Keys) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values
