"""Breakdown: a prediction by model part, and the largest buffers, as lines of the report."""

from lmwright.hardware.chips import GIB
from lmwright.planner.compiler.buffers import Buffer
from lmwright.planner.compiler.cost import Estimate
from lmwright.planner.units import duration

MIN_SHARE = 0.005  # of the step; smaller entries are left out
MIN_BUFFER_BYTES = GIB // 100


def part_lines(found: Estimate) -> list[str]:
    """Seconds of each part of the model, the largest first, and what they go to."""
    lines = []
    least = MIN_SHARE * found.step_s
    for part, kinds in sorted(found.by_part.items(), key=lambda item: -sum(item[1].values())):
        total = sum(kinds.values())
        if total >= least:
            shown = sorted(((s, k) for k, s in kinds.items() if s >= least), reverse=True)
            of = ", ".join(
                f"{duration(seconds, found.step_s).split()[0]} {kind}" for seconds, kind in shown
            )
            lines.append(f"  {duration(total, found.step_s, 8)}  {part}: {of}")
    return ["by part:", *lines]


def buffer_lines(buffers: list[Buffer]) -> list[str]:
    """The largest buffers; nothing where none is worth a line."""
    lines = [
        f"  {b.nbytes / GIB:8.2f} GiB  {b.part}: {b.shape}"
        for b in buffers
        if b.nbytes >= MIN_BUFFER_BYTES
    ]
    return ["largest buffers, not all alive at once:", *lines, ""] if lines else []
