"""Curves for the page's script: JSON lists, thinned if they have too many points."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lmwright.report.read import RunRecord, Series

POINTS = 2000
POINTS_OF_ALL_RUNS = 8000
CLOCK_POINTS = 1000

Curve = dict[str, list[Any]]


def points_per_curve(num_runs: int) -> int:
    """Maximum number of points of a drawn curve, so that many runs still make one small page."""
    return max(min(POINTS, POINTS_OF_ALL_RUNS // num_runs), 100)


def curves_of(record: RunRecord, label: str, limit: int) -> dict[str, Any]:
    """All curves of a run, and the clock that turns steps into tokens and hours."""
    return {
        "name": label,
        "clock": clock_of(record),
        "train": {name: curve(series, limit) for name, series in record.train.items()},
        "evals": _groups(record.evals, limit),
        "tasks": _groups(record.tasks, limit),
        "resumes": record.resumes,
    }


def _groups(groups: Mapping[str, Mapping[str, Series]], limit: int) -> dict[str, dict[str, Curve]]:
    return {
        group: {name: curve(series, limit) for name, series in curves.items()}
        for group, curves in groups.items()
    }


def curve(series: Series, limit: int) -> Curve:
    """Steps and values, at most `limit` of them; null stands for nan and inf."""
    indices = thin(series.values, limit)
    return {
        "step": [series.steps[i] for i in indices],
        "value": [_finite(series.values[i]) for i in indices],
    }


def thin(values: list[float], limit: int) -> list[int]:
    """Indices to draw, at most `limit` (3 or more): all of them, or the first, the last and both
    extremes of each interval between, so that no spike is lost.

    In a stretch with gaps (values that are not finite) the lower extreme makes room for one.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    inner = len(values) - 2
    stretches = (limit - 2) // 2
    indices = {0, len(values) - 1}
    for i in range(stretches):
        span = range(1 + inner * i // stretches, 1 + inner * (i + 1) // stretches)
        finite = [j for j in span if math.isfinite(values[j])]
        gaps = [j for j in span if not math.isfinite(values[j])]
        if finite:
            indices.add(max(finite, key=values.__getitem__))
        if gaps:
            indices.add(gaps[0])
        else:
            indices.add(min(finite, key=values.__getitem__))
    return sorted(indices)


def clock_of(record: RunRecord) -> Curve:
    """Steps with the tokens seen and the hours run until then; no tokens if they were never logged.

    The page draws straight lines between these points.
    """
    steps = record.hours.steps
    stride = max(math.ceil(len(steps) / CLOCK_POINTS), 1)
    steps = [*steps[:-1:stride], steps[-1]]
    clock = {"step": steps, "tokens": [], "hours": _at(steps, record.hours)}
    seen = record.train.get("tokens_seen", Series())
    if seen.values and all(map(math.isfinite, seen.values)):
        # Nothing is seen at step 0, though nothing is logged there.
        clock["tokens"] = _at(steps, Series([0, *seen.steps], [0.0, *seen.values]))
    return clock


def _at(steps: list[int], series: Series) -> list[float]:
    return np.interp(steps, series.steps, series.values).tolist()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
