"""Remat: what the backward pass recomputes on GPUs where the run leaves it to them (`train.remat`
is `auto` or `auto_block`).

    Run, GPUs --the analytic answer for each policy--> the leanest of the fastest that fit

`plan` and `train` ask the same functions, so they choose the same, at a resume too. Other devices
choose nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from lmwright.config.run import UNCHOSEN, RematName, Run
from lmwright.core.compute import REMATS
from lmwright.errors import UserError
from lmwright.hardware.devices import GPUS, gpu_name
from lmwright.planner.analytic.candidates import is_legal
from lmwright.planner.analytic.machine import Machine, parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.units import memory_size

SAME_SHARE = 0.01  # of a step, by which a leaner policy may be slower
ROOM_SHARE = 0.9  # of the usable memory that is filled by estimate
GIVEN_SHARE = 0.9  # of the usable memory of its kind; a card that gives less counts with that
LEANEST: RematName = "block"
ASSUMED = "h100"  # whose rates a card has that is not in the tables


@dataclass(frozen=True)
class Choice:
    """A run whose `train.remat` is a policy, and why that one."""

    run: Run
    note: str = ""
    """One sentence; empty where nothing was chosen."""


def settled(run: Run, machine: Machine) -> Choice:
    """The run with a policy in place of `auto`, chosen where the machine has GPUs."""
    if run.train.remat not in UNCHOSEN:
        return Choice(run)
    if machine.platform != "gpu":
        return Choice(_with(run, run.train.fixed_remat))
    ways = [_with(run, name) for name in REMATS]
    try:
        answers = [Quick.of(way, machine) for way in ways if is_legal(way)]
    except UserError:  # of the layout, which is said where the run is resolved
        return Choice(_with(run, run.train.fixed_remat))
    best = leanest_of_fastest(answers)
    limit = machine.usable_bytes or 0
    used = f"{memory_size(best.memory.peak)} of {memory_size(limit)} by estimate"
    why = "the leanest of the fastest that fit" if _fits(best) else "the leanest, as none fits"
    if best.fits and not _fits(best):
        why = "the leanest, as none leaves a tenth free"
    name = best.run.train.remat
    return Choice(
        best.run,
        f"remat {name}: chosen for {machine.device_kind or machine.name}, {why} ({used}); "
        f"train.remat sets another",
    )


def settled_here(run: Run, devices: Sequence[jax.Device]) -> Choice:
    """`settled` on GPUs that are there. A card that is not in the tables counts with the memory
    that it reports; one that reports none takes the leanest policy."""
    if run.train.remat not in UNCHOSEN:
        return Choice(run)
    machine = machine_here(devices)
    if machine is None:
        note = f"remat {LEANEST}: the memory of {devices[0].device_kind} is not known"
        return Choice(_with(run, LEANEST), note)
    return settled(run, machine)


def machine_here(devices: Sequence[jax.Device]) -> Machine | None:
    """GPUs that are there as a machine; None where their memory is not known. With several
    processes only the tables count, since all must choose the same."""
    kind, count = devices[0].device_kind, len(devices)
    known = gpu_name(kind)
    alone = jax.process_count() == 1
    given = (devices[0].memory_stats() or {}).get("bytes_limit") if alone else None
    if known is None and given is None:
        return None
    one = parse_machine(f"gpu:{known or ASSUMED}")
    nodes = max(1, -(-count // GPUS[one.kind].per_node))
    nodes = nodes if count % nodes == 0 else 1
    limit = one.usable_bytes
    assert limit is not None
    if given is not None and (known is None or given < GIVEN_SHARE * limit):
        limit = given
    return replace(
        one, name=f"gpu:{known or kind}x{count}", device_kind=kind, num_chips=count,
        num_devices=count, num_groups=nodes, usable_bytes=limit,
    )  # fmt: skip


def leanest_of_fastest(answers: Sequence[Quick]) -> Quick:
    """The answer with the least memory of those that fit with some room and take at most 1 % longer
    than the fastest; the one with the least memory where none fits."""
    fitting = [answer for answer in answers if _fits(answer)]
    if not fitting:
        return min(reversed(answers), key=lambda answer: answer.memory.peak)
    fastest = min(answer.step_s for answer in fitting)
    fast = [answer for answer in fitting if answer.step_s <= (1 + SAME_SHARE) * fastest]
    return min(reversed(fast), key=lambda answer: answer.memory.peak)  # of equals, the later policy


def _fits(answer: Quick) -> bool:
    limit = answer.limit_bytes
    return answer.fits and (limit is None or answer.memory.peak <= ROOM_SHARE * limit)


def _with(run: Run, name: RematName) -> Run:
    return replace(run, train=replace(run.train, remat=name))
