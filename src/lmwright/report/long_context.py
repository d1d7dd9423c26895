"""Plots of long contexts as SVG: loss by position, and needles found by length and depth."""

import math
from collections.abc import Sequence
from typing import Any

from lmwright.report.measured import Line, between
from lmwright.report.read import RunRecord

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 34
LINES = 8  # as many as there are colors
GRID = (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 2.5, 5.0)


def position_plot(records: Sequence[RunRecord], labels: Sequence[str]) -> dict[str, Any] | None:
    """Coordinates of the curves of loss by position, newest last; None where nothing was
    measured."""
    named = [
        (_name(line, label if len(records) > 1 else ""), line)
        for record, label in zip(records, labels, strict=True)
        for line in record.measured
        if line["kind"] == "positions" and line["starts"]
    ][-LINES:]
    if not named:
        return None
    losses = [loss for _, line in named for loss in line["losses"]]
    low, high = min(losses), max(losses)
    first = min(min(line["starts"]) for _, line in named)
    last = max(max(line["stops"]) for _, line in named)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def x(tokens: float) -> float:
        share = math.log(tokens / first) / max(math.log(last / first), 1e-9)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(loss: float) -> float:
        share = (high - loss) / max(high - low, 1e-9)
        return round(TOP + share * (HEIGHT - TOP - BOTTOM), 1)

    curves = []
    for color, (name, line) in enumerate(named):
        columns = (line["starts"], line["stops"], line["losses"], line["tokens"])
        points = [
            {
                "x": x(math.sqrt(start * max(stop - 1, start))),
                "y": y(loss),
                "text": f"{between(start, stop)} tokens before: {loss:.4f} ({count:,} tokens)",
            }
            for start, stop, loss, count in zip(*columns, strict=True)
        ]
        path = " ".join(f"{p['x']},{p['y']}" for p in points)
        curves.append({"name": name, "color": color % LINES, "points": points, "path": path})
    powers = range(math.ceil(math.log2(first)), int(math.log2(last)) + 1)
    step = max(len(powers) // 9, 1)
    return {
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT,
        "bottom": HEIGHT - BOTTOM, "curves": curves,
        "x_ticks": [(x(2**power), _short(2**power)) for power in powers[::step]],
        "y_ticks": [(y(tick), f"{tick:.4g}") for tick in ticks],
    }  # fmt: skip


def needle_plots(records: Sequence[RunRecord], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Grids of needles found, the newest of each source of each run."""
    plots = []
    for record, label in zip(records, labels, strict=True):
        newest = {
            (line["source"], line.get("adapter")): line
            for line in record.measured
            if line["kind"] == "needle"
        }
        for line in newest.values():
            name = _name(line, label if len(records) > 1 else "")
            plots.append({"name": name, **_grid(line)})
    return plots


def _grid(line: Line) -> dict[str, Any]:
    wide = (WIDTH - LEFT - RIGHT) / max(len(line["lengths"]), 1)
    high = min(28.0, 220 / max(len(line["depths"]), 1))
    bottom = TOP + high * len(line["depths"])
    cells = []
    for column, (length, hits) in enumerate(zip(line["lengths"], line["found"], strict=True)):
        for row, (depth, count) in enumerate(zip(line["depths"], hits, strict=True)):
            share = count / line["tries"]
            where = f"{length:,} tokens, depth {depth:g}%: {count} of {line['tries']} found"
            cells.append(
                {
                    "x": round(LEFT + column * wide, 1), "y": round(TOP + row * high, 1),
                    "share": round(share, 3), "text": f"{share:.0%}", "title": where,
                }
            )  # fmt: skip
    middle = lambda i, size: round((i + 0.5) * size, 1)  # noqa: E731
    return {
        "width": WIDTH, "height": round(bottom + BOTTOM), "wide": round(wide - 2, 1),
        "high": round(high - 2, 1), "left": LEFT, "right": WIDTH - RIGHT, "bottom": bottom,
        "cells": cells,
        "x_ticks": [(LEFT + middle(i, wide), _short(n)) for i, n in enumerate(line["lengths"])],
        "y_ticks": [(TOP + middle(i, high), f"{d:g}%") for i, d in enumerate(line["depths"])],
    }  # fmt: skip


def _name(line: Line, run: str) -> str:
    parts = [run, line.get("adapter", ""), line["source"], f"step {line['step']:,}"]
    return ", ".join(part for part in parts if part)


def _short(tokens: int) -> str:
    return f"{tokens >> 10}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from about `low` to about `high`, at most six."""
    span = max(high - low, 1e-3)
    scale = 10.0 ** math.floor(math.log10(span))
    step = next(scale * each for each in GRID if span / (scale * each) <= 5)
    return [step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)]
