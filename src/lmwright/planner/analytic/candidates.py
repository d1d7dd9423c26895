"""Candidates: other ways to run the same run on a machine, and what the analytic model says.

    Run --mesh x remat x microbatches x optimizer--> [Candidate] --best first--> search, suggestions

The global batch, and with it what is learned, stays; an optimizer with smaller state is offered
beside the run's own and marked, since it trains differently.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from lmwright.config.fields import default_of
from lmwright.config.run import Mesh, Run, seq_len_of
from lmwright.core.compute import REMATS
from lmwright.errors import UserError
from lmwright.optim import KINDS
from lmwright.planner.advice import TIE_SHARE
from lmwright.planner.analytic.layout import on_paper
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.units import mesh_text

SMALLER_STATE = {"adamw": ("adam8bit",)}
MOST_TENSOR = 64  # ways; beyond, partial sums outweigh what they save
LEAST_CONTEXT_TOKENS = 2048  # of a row on one device


@dataclass(frozen=True)
class Candidate:
    """One way to run, and its overrides over the run as it was given."""

    run: Run
    given: Run
    quick: Quick

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        """Words that turn the given run into this one, for the command line."""
        words = []
        for section in ("mesh", "train"):
            new, old = getattr(self.run, section), getattr(self.given, section)
            words += [
                f"{section}.{f.name}={getattr(new, f.name)}"
                for f in fields(new)
                if getattr(new, f.name) != getattr(old, f.name)
            ]
        return (*words, *optimizer_overrides(self.given.optim, self.run.optim))

    @property
    def changes_training(self) -> bool:
        return self.run.optim != self.given.optim

    @property
    def label(self) -> str:
        """Mesh, remat, microbatches and, where it is another one, the optimizer."""
        train = self.run.train
        pieces = f", {train.num_microbatches} microbatches" if train.num_microbatches > 1 else ""
        star = f", {self.run.optim.kind}*" if self.changes_training else ""
        return f"{mesh_text(dict(self.quick.plan.mesh.shape))}, remat {train.remat}{pieces}{star}"


def candidates(
    run: Run,
    machine: Machine,
    *,
    meshes: Iterable[Mesh] | None = None,
    remats: Iterable[str] = tuple(REMATS),
    optimizers: bool = False,
) -> list[Candidate]:
    """Every legal way to run, those that fit and are fast first; of ways that differ in
    microbatches alone, the best one."""
    optims = [run.optim]
    if optimizers:
        optims += [with_kind(run.optim, kind) for kind in SMALLER_STATE.get(run.optim.kind, ())]
    if meshes is None:
        meshes = list(meshes_of(run, machine))
        whole = [mesh for mesh in meshes if machine.fits_torus(vars(mesh))]
        ways = candidates(run, machine, meshes=whole, remats=remats, optimizers=optimizers)
        if ways or len(whole) == len(meshes):
            return ways  # meshes that cut torus axes share links: only where there is no other
    best: dict[Any, Candidate] = {}
    for mesh in meshes:
        for pieces in microbatches_of(run):
            shape = replace(run, mesh=mesh, train=replace(run.train, num_microbatches=pieces))
            try:
                plan = on_paper(shape, machine)
            except UserError:
                continue
            for remat in remats:
                for optim in optims:
                    train = replace(shape.train, remat=remat)
                    new = replace(shape, train=train, optim=optim)
                    quick = Quick(new, machine, replace(plan, run=new))
                    candidate = Candidate(new, run, quick)
                    key = (mesh, remat, optim.kind)
                    if key not in best or rank(candidate) < rank(best[key]):
                        best[key] = candidate
    return sorted(best.values(), key=rank)


def rank(candidate: Candidate) -> tuple:
    """Sorts candidates: what fits by time, then what does not by how much is missing. What
    trains differently must be better by more than a tie."""
    quick = candidate.quick
    if quick.fits:
        margin = 1 + TIE_SHARE if candidate.changes_training else 1
        return 0, quick.step_s * margin, quick.memory.peak
    return 1, quick.over_bytes


def meshes_of(run: Run, machine: Machine) -> Iterator[Mesh]:
    """Meshes of data, fsdp, context and tensor; between slices and nodes there is data alone."""
    devices, groups, seq_len = machine.num_devices, machine.num_groups, seq_len_of(run)
    contexts = [c for c in divisors(devices) if c == 1 or seq_len // c >= LEAST_CONTEXT_TOKENS]
    for tensor in (t for t in divisors(devices // groups) if t <= MOST_TENSOR):
        for context in contexts:
            rest, odd = divmod(devices, tensor * context)
            if odd:
                continue
            for data in (d for d in divisors(rest) if d % groups == 0):
                yield Mesh(data=data, fsdp=rest // data, context=context, tensor=tensor)


def microbatches_of(run: Run) -> Iterator[int]:
    """Powers of two that divide the global batch."""
    pieces = 1
    while run.train.global_batch_size % pieces == 0:
        yield pieces
        pieces *= 2


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]


def with_kind(optim: Any, kind: str) -> Any:
    """An optimizer of another kind with what both have in common."""
    cls = KINDS[kind]
    shared = {f.name for f in fields(cls)} & {f.name for f in fields(optim)} - {"kind"}
    return cls(**{name: getattr(optim, name) for name in shared})


def optimizer_overrides(old: Any, new: Any) -> list[str]:
    """Words that turn one optimizer section into another: naming a kind empties it."""
    if new == old:
        return []
    words = [f"optim.kind={new.kind}", *_said("optim", new)]
    if new.schedule != default_of(type(new).__dataclass_fields__["schedule"]):
        kind = f"optim.schedule.kind={new.schedule.kind}"
        words += [kind, *_said("optim.schedule", new.schedule)]
    return words


def _said(section: str, value: Any) -> Iterator[str]:
    for f in fields(value):
        set_to = getattr(value, f.name)
        if f.name not in ("kind", "schedule") and set_to != default_of(f):
            yield f"{section}.{f.name}={'none' if set_to is None else set_to}"
