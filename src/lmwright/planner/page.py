"""plan.html: the answer of `plan` as one page: text, tensors, and what is alive when.

    lines, [Tensor], Timeline --> plan.html.j2: tables, SVG --plan.js--> names under the pointer

The page forbids itself every network access. All text is escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lmwright.guard.temporary import write_output
from lmwright.planner.analytic.tensors import Tensor
from lmwright.planner.compiler.peak import GRADIENTS, SAVED, TEMPORARIES
from lmwright.planner.compiler.timeline import Timeline
from lmwright.planner.units import memory_size

PAGE_FILE = "plan.html"
FOLDER = Path(__file__).parent
STATE = "weights and optimizer"
USES = (STATE, SAVED, GRADIENTS, TEMPORARIES)  # from the bottom
COLUMNS = 800
WIDTH, HEIGHT = 1000, 240
BAR, MOST_BARS = 9, 60


@dataclass(frozen=True)
class Chart:
    """A timeline as shapes of an SVG, and the data that a script shows under the pointer."""

    areas: list[dict[str, Any]]
    bars: list[dict[str, Any]]
    loops: list[dict[str, Any]]
    height: int
    data: dict[str, Any]
    note: str

    @classmethod
    def of(cls, timeline: Timeline, state_bytes: int) -> "Chart":
        """The chart above `state_bytes` of weights and optimizer, which are there all the time."""
        at, most = timeline.fullest
        top, length = state_bytes + most, max(1, timeline.length)
        scale = WIDTH / length
        bars = sorted(timeline.drawn(), key=lambda life: -life.nbytes)[:MOST_BARS]
        bars.sort(key=lambda life: life.start)
        return cls(
            areas=_areas(timeline, state_bytes, top),
            bars=[
                {
                    "x": round(life.start * scale, 2),
                    "width": round(max(1.0, (life.end - life.start) * scale), 2),
                    "y": HEIGHT + 14 + BAR * row,
                    "use": USES.index(life.use),
                    "text": f"{_label(life)}, {memory_size(life.nbytes)}, {life.name}",
                }
                for row, life in enumerate(bars)
            ],
            loops=[
                {
                    "x": round(loop.start * scale, 2),
                    "width": round((loop.end - loop.start) * scale, 2),
                    "text": f"loop {loop.name}"
                    + (f", {loop.trips} times" if loop.trips is not None else ""),
                }
                for loop in timeline.loops
            ],
            height=HEIGHT + 14 + BAR * len(bars),
            data={
                "length": length,
                "state": state_bytes,
                "lives": [
                    [_label(life), life.use, life.nbytes, life.start, life.end]
                    for life in timeline.drawn()
                ],
                "loops": [[loop.trips, loop.start, loop.end] for loop in timeline.loops],
            },
            note=f"fullest at instruction {at:,} of {length:,}: {memory_size(top)} by this account",
        )


def _label(life: Any) -> str:
    return f"{life.use}, {life.part}: {life.shape}"


def _areas(timeline: Timeline, state_bytes: int, top: int) -> list[dict[str, Any]]:
    """One polygon for each use, on those below it; of several instructions in a column, the one
    with most."""
    totals = timeline.totals()
    length = max(1, timeline.length)
    sums = [sum(column) for column in zip(*totals.values(), strict=True)] or [0]
    places = []
    for column in range(min(COLUMNS, length)):
        inside = range(column * length // COLUMNS, max(1, (column + 1) * length // COLUMNS))
        if length < COLUMNS:
            inside = range(column, column + 1)
        places.append(max(inside, key=sums.__getitem__))
    below = [0.0] * len(places)
    width = WIDTH / len(places)
    areas = []
    for number, use in enumerate(USES):
        above = [
            low + (state_bytes if use == STATE else totals[use][at] if use in totals else 0)
            for low, at in zip(below, places, strict=True)
        ]
        if above != below:
            areas.append({"use": number, "name": use, "points": _polygon(below, above, width, top)})
        below = above
    return areas


def _polygon(below: list[float], above: list[float], width: float, top: int) -> str:
    def edge(values: list[float]) -> list[str]:
        points = []
        for column, value in enumerate(values):
            y = HEIGHT * (1 - value / top)
            points += [f"{column * width:.2f},{y:.2f}", f"{(column + 1) * width:.2f},{y:.2f}"]
        return points

    return " ".join([*edge(above), *reversed(edge(below))])


def write_page(
    folder: Path,
    title: str,
    lines: Sequence[str],
    tensors: Sequence[Tensor] = (),
    chart: Chart | None = None,
) -> Path:
    """Writes plan.html into `folder`; returns its path."""
    path = folder / PAGE_FILE
    write_output(path, render(title, lines, tensors, chart).encode(errors="replace"))
    return path


def render(title: str, lines: Sequence[str], tensors: Sequence[Tensor], chart: Chart | None) -> str:
    """The page as HTML text."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return env.get_template("plan.html.j2").render(
        title=title,
        text="\n".join(lines),
        tensors=[
            {
                "cells": [
                    tensor.name,
                    tensor.fate,
                    " x ".join(map(str, tensor.shape)),
                    memory_size(tensor.chip_bytes) if tensor.chip_bytes else "",
                    memory_size(tensor.host_bytes) if tensor.host_bytes else "",
                    f"{tensor.times:,}",
                    ", ".join(tensor.needed_by),
                ]
            }
            for tensor in tensors
        ],
        chart=chart,
        uses=USES,
        width=WIDTH,
        plot_height=HEIGHT,
        bar=BAR - 2,
        # htmlsafe: no text in the data can end the script element that holds it
        data=Markup(jinja2.utils.htmlsafe_json_dumps(chart.data if chart else None)),
        css=Markup((FOLDER / "plan.css").read_text()),
        js=Markup((FOLDER / "plan.js").read_text()),
    )
