"""Suggestions: changes that make a run fit that does not, by the analytic model.

First come changes of one setting, then of several, then the smallest slice of the same generation
on which some way fits, with the arithmetic of each. The least harmful come first: those that train
identically and are no slower, those that take time, those that train differently.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from lmwright.config.check import check_memory
from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.hardware.chips import GIB
from lmwright.hardware.devices import GPUS
from lmwright.hardware.slices import names_of
from lmwright.planner.analytic.candidates import (
    PACKED,
    SMALLER_STATE,
    Candidate,
    candidates,
    meshes_of,
    rank,
    with_kind,
)
from lmwright.planner.analytic.machine import Machine, parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.cost import cost_of
from lmwright.planner.later import later_of, mean_step_s
from lmwright.planner.units import short_duration
from lmwright.program.lora_section import LowRank
from lmwright.program.trainee import training_of

MOST_NODES = 64


@dataclass(frozen=True)
class Suggestions:
    """Suggestions that would make a run fit."""

    lines: list[str]
    best: Candidate | None
    """The fastest way that fits this machine, or else the smallest larger one; None where there
    is neither."""


def suggest(
    run: Run, machine: Machine, hours: float | None = None, over_bytes: float = 0.0
) -> Suggestions:
    """Suggestions that would make the run fit the machine, or machines on which it would fit;
    `hours` is the length of a session. `over_bytes` are too much by the compiler: each suggestion
    saves as many, by the analytic model, which may hold that the run itself fits."""
    most = Quick.of(run, machine).memory.peak - over_bytes

    def cures(way: Candidate) -> bool:
        return way.quick.fits and bool(way.overrides) and way.quick.memory.peak <= most

    lines = ["", "what would make it fit, by the analytic model:"]
    fitting = [c for c in single_changes(run, machine, cures) if cures(c)]
    fitting.sort(key=lambda c: (c.harm, c.quick.step_s))
    single = {c.overrides: c for c in fitting}
    lines += [_line(candidate) for candidate in single.values()]
    every = candidates(run, machine, optimizers=True, refused=True)
    every = [c for c in every if cures(c) or not c.quick.fits]
    fastest = next((c for c in every if cures(c) and not c.changes_training), None)
    ways = [c for c in every if c.overrides not in single]
    best = ways[0] if ways else None
    faster = all(best is not None and rank(best) < rank(other) for other in single.values())
    if best is not None and best.quick.fits and faster:
        lines.append("  the fastest configuration that fits this machine:")
        lines.append("  " + _line(best))
        return Suggestions(lines + _adapter_lines(adapters(run, machine)), fastest or best)
    if best is not None and not single:
        parts = best.quick.memory.parts()
        largest = max(parts, key=parts.get)
        lines.append(
            f"  on {machine.name} nothing does: even the smallest configuration, {best.label}, is "
            f"{best.quick.over_bytes / GIB:,.2f} GiB too large; its largest part, {largest}, "
            f"takes {parts[largest] / GIB:,.2f} GiB{_close(best.quick)}"
        )
    if single:
        more = _adapter_lines(adapters(run, machine))
        return Suggestions(lines + more, fastest or next(iter(single.values())))
    tuned = adapters(run, machine)
    if tuned is not None:
        lines += _adapter_lines(tuned)
        return Suggestions([*lines, *larger_way(run, machine, hours)[1]], tuned)
    way, more = larger_way(run, machine, hours)
    return Suggestions(lines + more, way)


def single_changes(
    run: Run, machine: Machine, cures: Callable[[Candidate], bool]
) -> Iterator[Candidate]:
    """Candidates that change one of remat, microbatches, mesh, optimizer and bits of block inputs;
    of the first two, the best ones that make the run fit."""
    yield from sorted(
        filter(cures, candidates(run, machine, meshes=[run.mesh], refused=True)),
        key=lambda c: (len(c.overrides), c.quick.step_s),
    )[:2]
    same = [run.train.fixed_remat]
    yield from candidates(run, machine, meshes=meshes_of(run, machine), remats=same)[:1]
    for kind in SMALLER_STATE.get(run.optim.kind, ()):
        new = replace(run, optim=with_kind(run.optim, kind))
        yield Candidate(new, run, Quick.of(new, machine))
    yield from islice(filter(cures, fewer_bits(run, machine)), 1)


def fewer_bits(run: Run, machine: Machine) -> Iterator[Candidate]:
    """The run with block inputs in fewer bits, the least harmful first."""
    remat = run.train.fixed_remat
    remat = "block" if remat == "none" else remat
    for kept in PACKED:
        new = replace(run, train=replace(run.train, remat=remat, block_inputs=kept))
        with suppress(UserError):
            check_memory(new)
            yield Candidate(new, run, Quick.of(new, machine))


def adapters(run: Run, machine: Machine) -> Candidate | None:
    """The best way to train adapters on a frozen model instead; None where none fits, or the run
    does so already or starts from nothing, which adapters cannot."""
    if training_of(run).freezes or run.train.init_from is None:
        return None
    train = replace(run.train, head_gradient="by_chunk")  # it has none
    try:
        ways = candidates(replace(run, lora=LowRank(), train=train), machine)
    except UserError:
        return None
    way = next((way for way in ways if way.quick.fits), None)
    return None if way is None else replace(way, given=run)


def _adapter_lines(tuned: Candidate | None) -> list[str]:
    if tuned is None:
        return []
    return ["  with a frozen model and adapters beside it:", "  " + _line(tuned)]


def _line(candidate: Candidate) -> str:
    quick = candidate.quick
    parts = quick.memory
    return (
        f"  {' '.join(candidate.overrides)} ({candidate.harm_text}): {parts.peak / GIB:.2f} GiB = "
        f"{parts.state / GIB:.2f} state + {(parts.cast + parts.gradients) / GIB:.2f} cast weights "
        f"and gradients + "
        f"{parts.saved / GIB:.2f} saved + {parts.temporaries / GIB:.2f} temporaries, "
        f"{short_duration(quick.step_s)} a step{_close(quick)}"
    )


def _close(quick: Quick) -> str:
    return "; close, ask the compiler" if quick.is_close else ""


def larger_way(
    run: Run, machine: Machine, hours: float | None
) -> tuple[Candidate | None, list[str]]:
    """The best way on the smallest larger machine of the same kind that trains the run, and
    what it takes, as lines."""
    tried = 0
    for name in larger(machine):
        bigger = parse_machine(name)
        ways = candidates(run, bigger)
        tried += 1
        if not ways or not ways[0].quick.fits:
            continue
        quick = ways[0].quick
        try:
            step_s = mean_step_s(quick.step_s, later_of(ways[0].run, bigger))
        except UserError:  # rows that are left when an adapter has ended
            continue
        cost = cost_of(run, bigger, step_s, quick.plan.tokens_per_step, hours=hours)
        lines = [
            f"  the smallest {machine.kind} that trains it is {bigger.name}, "
            f"{bigger.num_chips:,} chips:",
            "  " + _line(ways[0]),
            f"    {short_duration(quick.step_s)} a step, give or take {quick.error_share:.0%}, "
            f"{quick.tokens_per_s:,.0f} tokens/s",
        ]
        return ways[0], [*lines, *("    " + line for line in cost.lines())]
    return None, [f"  no larger {machine.kind} holds it either ({tried} sizes tried)"]


def larger(machine: Machine) -> Iterator[str]:
    """Names of larger machines of the same kind, smallest first."""
    if machine.platform == "gpu":
        per_node = GPUS[machine.kind].per_node
        for nodes in (2**k for k in range(MOST_NODES.bit_length())):
            if nodes * per_node > machine.num_chips:
                yield f"gpu:{machine.kind}x{nodes * per_node}"
    elif machine.platform == "tpu":
        chips = machine.num_chips // machine.num_groups
        for name in names_of(machine.kind):
            if parse_machine(name).num_chips > chips:
                yield name if machine.num_groups == 1 else f"{machine.num_groups}x{name}"
        largest = names_of(machine.kind)[-1]
        for slices in (2, 4, 8, 16):
            if slices > machine.num_groups:
                yield f"{slices}x{largest}"
