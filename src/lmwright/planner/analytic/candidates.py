"""Candidates: other ways to run the same run on a machine, and what the analytic model says.

    Run --mesh x remat x microbatches x optimizer--> [Candidate] --best first--> search, suggestions

The global batch, and with it what is learned, stays; an optimizer with smaller state is offered
beside the run's own and marked, since it trains differently. For a run that does not fit, the
host's memory and mlps by chunks are tried too, which train identically, and last of all block
inputs in fewer bits.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from lmwright.config.check import check_memory
from lmwright.config.fields import default_of
from lmwright.config.run import Mesh, Run, Train, seq_len_of
from lmwright.core.compute import FORMATS, OFFLOADS, REMATS
from lmwright.core.sharding import mesh_shape
from lmwright.errors import UserError
from lmwright.optim import KINDS
from lmwright.planner.advice import TIE_SHARE
from lmwright.planner.analytic.layout import on_paper
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.analytic.stock import stocks_of
from lmwright.planner.units import mesh_text
from lmwright.program.plan import Plan, refuse_chunks

RECURRENT_CHUNKS = (64, 128, 256, 512)  # tokens that meet each other by products of matrices
CHUNK_TOKENS = 4096  # of a row, of an mlp's chunk
MANY_CHUNKS = 2  # of the loss; with fewer there is one sum anyway
SMALLER_STATE = {"adamw": ("adam8bit",)}
PACKED = tuple(FORMATS)  # the least harmful first
MOST_TENSOR = 64  # ways; beyond, partial sums outweigh what they save
LEAST_CONTEXT_TOKENS = 2048  # of a row on one device


@dataclass(frozen=True)
class Candidate:
    """One way to run, compared with the run as it was given."""

    run: Run
    given: Run
    quick: Quick

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that turn the given run into this one, for the command line; none of a mesh
        that the given run has here without them."""
        words, plan = overrides(self.given, self.run), self.quick.plan
        try:
            machine = self.quick.machine
            given = mesh_shape(self.given.mesh, machine.num_devices, machine.num_groups)
        except UserError:
            return words
        if given != dict(plan.mesh.shape):
            return words
        return tuple(word for word in words if not word.startswith("mesh."))

    @property
    def changes_training(self) -> bool:
        ours, theirs = self.run, self.given
        other_optimizer = replace(ours.optim, offload=theirs.optim.offload) != theirs.optim
        other_inputs = ours.train.block_inputs != theirs.train.block_inputs
        return other_optimizer or other_inputs or ours.lora != theirs.lora

    @cached_property
    def slower(self) -> float:
        """Estimated slowdown against the given run, as a fraction (0.1 is 10 % slower), as if that
        run fitted; 0 if it cannot be laid out on this machine."""
        try:
            return self.quick.step_s / Quick.of(self.given, self.quick.machine).step_s - 1
        except UserError:
            return 0.0

    @property
    def harm(self) -> int:
        """0 if it trains identically and is not slower, 1 if it takes time, 2 if it trains
        differently."""
        if self.changes_training:
            return 2
        return int(self.slower > TIE_SHARE)

    @property
    def harm_text(self) -> str:
        """Effect of the change on training, in words."""
        if self.changes_training:
            return "trains differently"
        if self.harm:
            return f"trains identically, {self.slower:.0%} slower"
        return "trains identically, no slower"

    @property
    def label(self) -> str:
        """Mesh, remat, microbatches and, where it is another one, the optimizer."""
        train = self.run.train
        pieces = f", {train.num_microbatches} microbatches" if train.num_microbatches > 1 else ""
        star = ", adapters*" if self.run.lora != self.given.lora else ""
        if self.run.optim.kind != self.given.optim.kind:
            star += f", {self.run.optim.kind}*"
        if train.block_inputs != self.given.train.block_inputs:
            star += f", block inputs {train.block_inputs}*"
        host = "" if train.offload == "none" else f", {train.offload} on the host"
        host += "" if self.run.optim.offload == "none" else ", moments on the host"
        chunk = f", mlp by {train.mlp_chunk_tokens:,} tokens" if train.mlp_chunk_tokens else ""
        chunk += ", head's gradient once" if train.head_gradient == "once" else ""
        if (size := _recurrent_chunk(self.run)) != _recurrent_chunk(self.given):
            chunk += f", chunks of {size}"
        mesh = mesh_text(dict(self.quick.plan.mesh.shape))
        return f"{mesh}, remat {train.remat}{host}{chunk}{pieces}{star}"


def candidates(
    run: Run,
    machine: Machine,
    *,
    meshes: Iterable[Mesh] | None = None,
    remats: Iterable[str] = tuple(REMATS),
    optimizers: bool = False,
    refused: bool = False,
) -> list[Candidate]:
    """Every legal way to run, the fastest that fits first; of ways that differ only in
    microbatches, the best one. `refused`: the run does not fit, whatever the model says."""
    optims = [run.optim]
    if optimizers:
        optims += [with_kind(run.optim, kind) for kind in SMALLER_STATE.get(run.optim.kind, ())]
    if meshes is None:
        meshes = list(meshes_of(run, machine))
        whole = [mesh for mesh in meshes if machine.fits_torus(vars(mesh))]
        with_them = partial(candidates, remats=remats, optimizers=optimizers, refused=refused)
        ways = with_them(run, machine, meshes=whole)
        if ways or len(whole) == len(meshes):
            return ways  # meshes that cut torus axes share links: only where there is no other
    meshes = list(meshes)
    ways = _ways(run, machine, meshes, list(product(keeps_of(run, remats), optims)))
    if refused or not _fits(run, machine):
        offloaded = [pair for optim in optims for pair in on_host(run, optim)]
        ways += _ways(run, machine, meshes, offloaded)
        if optimizers and not any(way.quick.fits for way in ways):
            fewer_bits = [pair for optim in optims for pair in packed(run, optim)]
            ways += _ways(run, machine, meshes, fewer_bits)
    for way in tuple(ways):
        ways += rechunked(way)
        new = summed_once(way)
        if new is not None and all(new.run != other.run for other in ways):
            ways.append(new)
    return sorted(ways, key=rank)


def _fits(run: Run, machine: Machine) -> bool:
    try:
        return Quick.of(run, machine).fits
    except UserError:
        return False


def _chunks(plan: Plan) -> bool:
    """True if the mesh of a plan divides the chunks of its mlps."""
    try:
        refuse_chunks(plan)
    except UserError:
        return False
    return True


def _ways(
    run: Run, machine: Machine, meshes: Iterable[Mesh], choices: Iterable[tuple[Train, Any]]
) -> list[Candidate]:
    """The best number of microbatches for each mesh and each choice of (train, optim)."""
    best: dict[Any, Candidate] = {}
    for mesh in meshes:
        for pieces in microbatches_of(run):
            shape = replace(run, mesh=mesh, train=replace(run.train, num_microbatches=pieces))
            try:
                plan = on_paper(shape, machine)
            except UserError:
                continue
            for number, (train, optim) in enumerate(choices):
                train = replace(train, num_microbatches=pieces)
                new = replace(shape, train=train, optim=optim)
                if not _chunks(replace(plan, run=new)):
                    continue
                candidate = Candidate(new, run, Quick(new, machine, replace(plan, run=new)))
                key = (mesh, number)
                if key not in best or rank(candidate) < rank(best[key]):
                    best[key] = candidate
    return list(best.values())


def keeps_of(run: Run, remats: Iterable[str]) -> Iterator[Train]:
    """The run's `train` with each remat that fits its other settings."""
    for remat, head in product(remats, dict.fromkeys((run.train.head_gradient, "by_chunk"))):
        train = replace(run.train, remat=remat, head_gradient=head)
        if is_legal(replace(run, train=train)):
            yield train


def is_legal(run: Run) -> bool:
    """True if what the run keeps for the backward pass does not contradict itself."""
    try:
        check_memory(run)
    except UserError:
        return False
    return True


def summed_once(way: Candidate) -> Candidate | None:
    """A candidate that fits, with the gradient of the head added up once; None where that does not
    fit, or there are few chunks of the loss."""
    train, layout = way.run.train, way.quick.layouts[0]
    many = layout.seq_len >= MANY_CHUNKS * layout.chunk
    alone = way.quick.machine.num_devices == 1  # which adds up nothing
    if alone or not way.quick.fits or not many or train.head_gradient == "once":
        return None
    if way.quick.plan.training.freezes:  # a frozen head has no gradient
        return None
    new = replace(way.run, train=replace(train, head_gradient="once"))
    if not is_legal(new):
        return None
    plan = replace(way.quick.plan, run=new)
    candidate = Candidate(new, way.given, Quick(new, way.quick.machine, plan))
    return candidate if candidate.quick.fits else None


def rechunked(way: Candidate) -> Iterator[Candidate]:
    """The candidate with other chunks of a recurrence, which gives the same results; none for a
    model without."""
    present = _recurrent_chunk(way.run)
    if present is None:
        return
    for size in RECURRENT_CHUNKS:
        if size != present and seq_len_of(way.run) % size == 0:
            new = replace(way.run, model=replace(way.run.model, chunk_tokens=size))
            plan = replace(way.quick.plan, run=new)
            yield Candidate(new, way.given, Quick(new, way.quick.machine, plan))


def _recurrent_chunk(run: Run) -> int | None:
    """Tokens of a chunk of the model's recurrence; None for a model without."""
    return getattr(run.model, "chunk_tokens", None)


def on_host(run: Run, optim: Any) -> Iterator[tuple[Train, Any]]:
    """(train, optim) that put something on the host or cut mlps into chunks, with the same numbers
    as the run; only legal ones that differ from the run."""
    chunks = [None, CHUNK_TOKENS] if seq_len_of(run) > CHUNK_TOKENS else [None]
    for offload, chunk, moments in product(OFFLOADS, chunks, ("none", "moments")):
        train = replace(
            run.train, remat="block", offload=offload, mlp_chunk_tokens=chunk,
            head_gradient="by_chunk",  # which takes less memory
        )  # fmt: skip
        new = replace(run, train=train, optim=replace(optim, offload=moments))
        if new != run and is_legal(new):
            yield new.train, new.optim


def packed(run: Run, optim: Any) -> Iterator[tuple[Train, Any]]:
    """(train, optim) that keep block inputs in fewer bits, which changes gradients, besides what
    `on_host` gives; only legal ones that differ from the run."""
    for train, other in [(replace(run.train, remat="block"), optim), *on_host(run, optim)]:
        for kept in PACKED:
            new = replace(run, train=replace(train, block_inputs=kept), optim=other)
            if new != run and is_legal(new):
                yield new.train, new.optim


def rank(candidate: Candidate) -> tuple:
    """Sorts candidates: what fits by time, then the others by how much memory they lack. What
    trains differently must be better by more than a tie."""
    quick = candidate.quick
    if quick.fits:
        margin = 1 + TIE_SHARE if candidate.changes_training else 1
        return 0, quick.step_s * margin, quick.memory.peak
    return 1, quick.over_bytes


def meshes_of(run: Run, machine: Machine) -> Iterator[Mesh]:
    """Meshes of data, fsdp, context and tensor, and of expert where there are experts; only data
    spans slices and nodes."""
    devices, groups, seq_len = machine.num_devices, machine.num_groups, seq_len_of(run)
    has_experts = any(w.is_routed for stock in stocks_of(run) for w in stock.weights)
    contexts = [c for c in divisors(devices) if c == 1 or seq_len // c >= LEAST_CONTEXT_TOKENS]
    for tensor in (t for t in divisors(devices // groups) if t <= MOST_TENSOR):
        for context in contexts:
            rest, odd = divmod(devices, tensor * context)
            if odd:
                continue
            for data in (d for d in divisors(rest) if d % groups == 0):
                for expert in divisors(rest // data) if has_experts else [1]:
                    yield Mesh(
                        data=data, fsdp=rest // data // expert, expert=expert, context=context,
                        tensor=tensor,
                    )  # fmt: skip


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
    """An optimizer of another kind with the fields that both have in common."""
    cls = KINDS[kind]
    shared = {f.name for f in fields(cls)} & {f.name for f in fields(optim)} - {"kind"}
    return cls(**{name: getattr(optim, name) for name in shared})


def overrides(old: Run, new: Run) -> tuple[str, ...]:
    """Overrides that turn one run into another that differs in mesh, `train`, optimizer and
    chunks."""
    words = []
    for section in ("mesh", "train"):
        values, before = getattr(new, section), getattr(old, section)
        words += [
            f"{section}.{f.name}={_word(getattr(values, f.name))}"
            for f in fields(values)
            if getattr(values, f.name) != getattr(before, f.name)
        ]
    if (chunk := _recurrent_chunk(new)) != _recurrent_chunk(old):
        words.append(f"model.chunk_tokens={chunk}")
    if new.lora != old.lora:
        words.append(f"lora.rank={new.lora.rank}")
    return (*words, *optimizer_overrides(old.optim, new.optim))


def optimizer_overrides(old: Any, new: Any) -> list[str]:
    """Overrides that turn one optimizer section into another: naming a kind empties it."""
    if new == old:
        return []
    if replace(new, offload=old.offload) == old:
        return [f"optim.offload={new.offload}"]
    words = [f"optim.kind={new.kind}", *_said("optim", new)]
    if new.schedule != default_of(type(new).__dataclass_fields__["schedule"]):
        kind = f"optim.schedule.kind={new.schedule.kind}"
        words += [kind, *_said("optim.schedule", new.schedule)]
    return words


def _said(section: str, value: Any) -> Iterator[str]:
    for f in fields(value):
        set_to = getattr(value, f.name)
        if f.name not in ("kind", "schedule") and set_to != default_of(f):
            yield f"{section}.{f.name}={_word(set_to)}"


def _word(value: Any) -> Any:
    return "none" if value is None else value
