"""Fit: warm-up, decay and cool-down of a recipe or preset, shortened for a short run. A run that
has begun keeps its own when it becomes longer, and when it becomes shorter, if they still fit.

Only such values: what the run file or the command line says is refused where it does not fit.
"""

import math
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmwright.config.fields import UNSET
from lmwright.config.merge import RECIPE, Merged
from lmwright.config.run import Run
from lmwright.config.text import Keys

GIVEN = (f"{RECIPE} ", "preset ", "depth ")
SHARE = 10  # a fitted warm-up is a tenth of the run
FALLING = ("linear", "cosine", "exponential")
FITTED = "fitted to the run's length", "the {old} of {origin} do not fit into {of}; using {new}"
BEGUN = "as the run has begun", "{new} instead of the {old} of {origin}, as {of} began"
SCHEDULE: Keys = ("optim", "schedule")
MARK = "_given"


Given = dict[Any, tuple[Any, str]]
"""Values by the names of their fields, each with its origin."""
EpochRows = Callable[[str], int | None]
"""Rows of an epoch of a folder of prepared data, or None where there is none."""


def fit_schedule(merged: Merged, epoch_rows: EpochRows) -> list[str]:
    """Shortens a warm-up, then a decay or cool-down, to the steps of the run; a line for each.
    `epoch_rows` counts the steps of `train.epochs`."""
    steps, length = _length(merged.values, epoch_rows)
    schedule = _at(merged.values, SCHEDULE)
    if type(steps) is not int or steps < 1 or not isinstance(schedule, dict):
        return []
    end = "cooldown_steps" if schedule.get("kind") == "exponential" else "decay_steps"
    warmup, decay = (schedule.get(name, 0) for name in ("warmup_steps", end))
    if type(warmup) is not int or type(decay) is not int:
        return []
    falls = schedule.get("kind") in FALLING  # which takes a step after the warm-up at least
    lines: list[str] = []
    if warmup + decay + falls > steps:
        least = int(schedule.get("kind") == "wsd")  # which decays for a step at least
        most = min(max(steps // SHARE, 1), steps - falls - least)
        lines += _put(merged, "warmup_steps", min(warmup, most), *FITTED, length)
        left = max(steps - falls - schedule.get("warmup_steps", 0), least)
        lines += _put(merged, end, min(decay, left), *FITTED, length)
    return lines + _as_begun(merged, ("warmup_steps", end), steps - falls)


def given_schedule(merged: Merged) -> Given:
    """Values of the schedule that a recipe or preset gives, each with its origin."""
    schedule = _at(merged.values, SCHEDULE)
    return {
        keys[-1]: (schedule[keys[-1]], origin)
        for keys, origin in merged.origin.items()
        if keys[:-1] == SCHEDULE and origin.startswith(GIVEN)
    }


def mark_given(run: Run, given: Given) -> None:
    """Notes in a run's schedule what a recipe or preset gave, so that it is fitted anew when the
    run is loaded again, be its data prepared since then or its length another. A schedule that
    `dataclasses.replace` has made has no such note."""
    if given:
        vars(run.optim.schedule)[MARK] = given


def put_given(merged: Merged, run: Run) -> None:
    """Puts what a recipe or preset gave to the schedule of a run in place of what was fitted."""
    for name, (value, origin) in vars(run.optim.schedule).get(MARK, {}).items():
        merged.merge({"optim": {"schedule": {name: value}}}, origin)


def count_steps(epochs: float, epoch_rows: int, global_batch_size: int) -> int:
    """Number of steps in `epochs`; the last step may reach into the next epoch."""
    return math.ceil(epochs * epoch_rows / global_batch_size)


def _length(values: Any, epoch_rows: EpochRows) -> tuple[Any, str]:
    """Steps of the run if known, and the text of the setting that gives them."""
    steps = _at(values, ("train", "steps"))
    if steps not in (None, UNSET):
        return steps, f"train.steps = {steps}"
    epochs = _at(values, ("train", "epochs"))
    folder, size = _at(values, ("data", "dir")), _at(values, ("train", "global_batch_size"))
    valid = isinstance(epochs, int | float) and isinstance(folder, str) and type(size) is int
    rows = epoch_rows(folder) if valid else None
    if not rows or size < 1:
        return None, ""
    steps = count_steps(epochs, rows, size)
    return steps, f"the {steps} steps of train.epochs = {epochs:g}"


def _as_begun(merged: Merged, names: tuple[str, ...], room: int) -> list[str]:
    """Keeps the values with which the run in `dir` has begun: shorter ones, and where others were
    fitted, those that fit into `room` steps."""
    folder, schedule = merged.values.get("dir"), _at(merged.values, SCHEDULE)
    begun: Any = {}
    if isinstance(folder, str) and "://" not in folder:
        with suppress(OSError, ValueError):  # there is none, or loading it says what is wrong
            begun = _at(tomllib.loads(Path(folder, "run.toml").read_text("utf-8")), SCHEDULE)
    there = [(begun or {}).get(name, 0) for name in names]
    fits = all(type(before) is int for before in there) and sum(there) <= room
    lines = []
    for name, before in zip(names, there, strict=True):
        value = schedule.get(name)
        fitted = merged.origin.get((*SCHEDULE, name), "").endswith(FITTED[0])
        if type(value) is type(before) is int and 0 < before != value:
            if before < value or (fitted and fits):
                lines += _put(merged, name, before, *BEGUN, folder)
    return lines


def _put(merged: Merged, name: str, new: int, why: str, line: str, of: Any) -> list[str]:
    """Puts another number in the place of a recipe's or preset's; a line that says so."""
    keys: Keys = (*SCHEDULE, name)
    schedule, origin = _at(merged.values, SCHEDULE), merged.origin.get(keys, "")
    old = schedule.get(name, 0)
    if new == old or not origin.startswith(GIVEN):
        return []
    schedule[name] = new
    merged.origin[keys] = f"{origin}, {why}"
    said = line.format(old=old, new=new, origin=origin, of=of)
    return [f"{'.'.join(map(str, keys))}: {said}"]


def _at(values: Any, keys: Keys) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values
