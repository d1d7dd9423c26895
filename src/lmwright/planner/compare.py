"""Compare: `lmwright plan --on any`: the same run on common machines, each at its best mesh.

Analytic alone. Remat, microbatches and mesh are chosen for each machine, the optimizer is the
run's own, and the cheapest machine on which it fits comes first.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.hardware.chips import GIB
from lmwright.planner.analytic.candidates import Candidate, candidates
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.remat import settled
from lmwright.planner.cost import RunCost, cost_of, figure, money
from lmwright.planner.later import later_of, mean_step_s

COMMON = (
    *(f"v3-{n}" for n in (8, 32)),
    *(f"v4-{n}" for n in (8, 16, 32, 64, 128, 256, 512)),
    *(f"v5e-{n}" for n in (4, 8, 16, 32, 64, 128, 256)),
    *(f"v5p-{n}" for n in (8, 16, 32, 64, 128, 256, 512)),
    *(f"v6e-{n}" for n in (4, 8, 16, 32, 64, 128, 256)),
    *(f"7x-{n}" for n in (8, 16, 32, 64, 128)),
    *(f"gpu:{gpu}x{n}" for gpu in ("a100", "h100", "h200", "b200") for n in (8, 16)),
)


@dataclass(frozen=True)
class Choice:
    """One machine, the best way to run on it, and what that takes."""

    name: str
    best: Candidate | None
    """None where no mesh of it can hold the run."""
    cost: RunCost | None

    @property
    def fits(self) -> bool:
        return self.best is not None and self.best.quick.fits


def compare(
    run: Run,
    *,
    hours: float | None = None,
    price: float | None = None,
    names: Sequence[str] | None = None,
) -> list[Choice]:
    """Common machines: what fits first, cheapest first (unknown prices after known ones). A
    `price` is that of a chip-hour of each of them."""
    choices = [_choice(run, name, hours, price) for name in names or COMMON]
    return sorted(choices, key=_order)


def _choice(run: Run, name: str, hours: float | None, price: float | None) -> Choice:
    machine = parse_machine(name)
    run = settled(run, machine).run
    ways = candidates(run, machine)
    if not ways:
        return Choice(name, None, None)
    quick = ways[0].quick
    tokens = quick.plan.tokens_per_step
    try:
        step_s = mean_step_s(quick.step_s, later_of(ways[0].run, machine))
    except UserError:  # rows that are left when an adapter has ended
        return Choice(name, None, None)
    cost = cost_of(run, machine, step_s, tokens, price=price, hours=hours)
    return Choice(name, ways[0], cost)


def _order(choice: Choice) -> tuple:
    if not choice.fits:
        return 2, 0.0
    usd = choice.cost.usd
    return (0, usd) if usd is not None else (1, choice.cost.hours)


def compare_lines(run: Run, choices: Sequence[Choice]) -> list[str]:
    """The table, and what does not fit in a line of its own."""
    hours = next((c.cost.session.hours for c in choices if c.fits and c.cost.session), None)
    head = "" if hours is None else f" {f'in {hours:g} h':>7} "
    lines = [
        f"{run.name} on common machines, by the analytic model, cheapest first:",
        "",
        f"{'':<13} {'chips':>5} {'step s':>8} {'hours':>8} {'USD':>12} {'GiB':>7} {head} "
        "at its best",
    ]
    for choice in (c for c in choices if c.fits):
        quick, cost = choice.best.quick, choice.cost
        part = "" if cost.session is None else f" {cost.session.steps / cost.steps:>7.0%} "
        usd = "no price" if cost.usd is None else money(cost.usd).removesuffix(" USD")
        lines.append(
            f"{choice.name:<13} {cost.chips:>5} {figure(quick.step_s):>8} {figure(cost.hours):>8} "
            f"{usd:>12} {quick.memory.peak / GIB:>7.2f} {part} {choice.best.label}"
        )
    over = [c for c in choices if c.best is not None and not c.fits]
    if over:
        text = ", ".join(f"{c.name} (by {c.best.quick.over_bytes / GIB:.1f} GiB)" for c in over)
        lines += ["", f"does not fit a device: {text}"]
    none = [c.name for c in choices if c.best is None]
    if none:
        size = run.train.global_batch_size
        lines += ["", f"no mesh divides {size} rows and this model over: {', '.join(none)}"]
    sources = {c.cost.price_source for c in choices if c.fits and c.cost.price_source}
    if sources:
        lines += ["", f"prices: {'; '.join(sorted(sources))}"]
    return lines


def compare_json(choices: Sequence[Choice]) -> str:
    """The table as JSON, in seconds, hours, bytes and USD."""
    rows = [
        {"machine": c.name, "fits": False}
        if c.best is None
        else {
            "machine": c.name,
            "fits": c.fits,
            "peak_bytes": c.best.quick.memory.peak,
            "limit_bytes": c.best.quick.limit_bytes,
            "step_s": c.best.quick.step_s,
            "overrides": c.best.overrides,
            "takes": c.cost.to_json(),
        }
        for c in choices
    ]
    return json.dumps({"machines": rows}, indent=1)
