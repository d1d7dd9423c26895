"""Cost: how long the compiled step takes, from the compiler's own schedule.

The program is walked in its order with two clocks: the TensorCore's, and that of the chip's
links, on which a `-start` puts its bytes and a `-done` waits for them. Loops count as often
as they turn. Costs of one instruction:

    product             the compiler's cycles / clock / share, never less than FLOPs / peak
    other fusion        the same cycles, never less than what it writes / HBM bandwidth
    products' kernel    FLOPs / peak / the share of it that a large model's products reach
    attention kernel    blocks x cycles of a block, see `compiler.kernel_cost`
    collective          bytes a device receives / (links x bandwidth), see `compiler.links`
    between slices      bytes that a chip sends or receives / its share of the host's network
    to or from the host bytes / PCIe bandwidth, each way by itself
    what has no cycles  bytes / HBM bandwidth; fills of memory too

A collective that the program does not split into `-start` and `-done` runs where the schedule
lets it: from when what it sends is there until the first product or kernel that needs its
result, or the end of the loop's turn. One that begins before a loop may go on in the fusions inside
of it, turn by turn, and end behind it; it is counted where it begins.

    ready ---- product ---- product ---- first use      hidden: what fits between
      '---- bytes on the links ----'

Rates are in `hardware.chips`; the estimate is as good as they are.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lmwright.hardware.chips import Rates
from lmwright.hardware.slices import Slice
from lmwright.planner.compiler.hlo import (
    Computation,
    Instruction,
    Program,
    memory_bytes,
)
from lmwright.planner.compiler.kernel_cost import attention_s
from lmwright.planner.compiler.links import host_bytes, transfer_s
from lmwright.planner.compiler.parts import OTHER, part_of, read_frames
from lmwright.planner.compiler.products import Products

COLLECTIVES = {
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute",
}  # fmt: skip
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
        "partition-id", "replica-id", "opt-barrier"}  # fmt: skip
NETWORK = {"send", "recv"}  # between slices, through the hosts
IN_PLACE = {"dynamic-update-slice", "scatter"}
_ALIASED = re.compile(r"\}: \((\d+), \{")  # operands that are results too
SCALAR_BYTES = 4096  # below, an instruction is bookkeeping
EXPOSED = "exposed collectives"
HOST = "exposed host transfers"
IN_ONE_PIECE = 0.5
"""Fraction of a collective in one instruction that counts as exposed, of what the schedule could
hide."""


@dataclass
class Estimate:
    """Seconds of one step on one device, and where they go."""

    step_s: float = 0.0
    by_kind: dict[str, float] = field(default_factory=dict)
    """matmul, attention, vector, memory, exposed collectives and host transfers; they add up to
    `step_s`."""
    by_part: dict[str, dict[str, float]] = field(default_factory=dict)
    """Part of the model to kind to seconds; they add up to `step_s` as well."""
    hidden_s: float = 0.0
    """Seconds of collectives and host transfers that arithmetic hides."""
    host_bytes: float = 0.0
    """Bytes to and from the memory of the host."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Number of times that each kind runs in a step."""
    matmul_flops: float = 0.0
    """FLOPs of all matmul fusions, rematerialized ones too."""
    unknown_loops: int = 0
    """Loops whose number of iterations is unknown; each was counted once."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part of the model."""
        return {part: sum(kinds.values()) for part, kinds in self.by_part.items()}

    def times(self, factor: float) -> "Estimate":
        """The estimate with every time multiplied by `factor`."""
        longer = lambda seconds: {name: factor * s for name, s in seconds.items()}  # noqa: E731
        return replace(
            self,
            step_s=factor * self.step_s,
            by_kind=longer(self.by_kind),
            by_part={part: longer(kinds) for part, kinds in self.by_part.items()},
            hidden_s=factor * self.hidden_s,
            host_bytes=factor * self.host_bytes,
        )

    def spend(self, part: str, kind: str, seconds: float) -> None:
        """Moves the core's clock on."""
        self.step_s += seconds
        for kinds in (self.by_kind, self.by_part.setdefault(part, {})):
            kinds[kind] = kinds.get(kind, 0.0) + seconds

    def count(self, kind: str, times: int) -> None:
        """Counts collectives."""
        self.collectives[kind] = self.collectives.get(kind, 0) + times

    def add(self, other: "Estimate", times: int) -> None:
        """Adds another estimate, `times` times."""
        for part, kinds in other.by_part.items():
            for kind, seconds in kinds.items():
                self.spend(part, kind, times * seconds)
        self.hidden_s += times * other.hidden_s
        self.host_bytes += times * other.host_bytes
        self.matmul_flops += times * other.matmul_flops
        self.unknown_loops += other.unknown_loops
        for kind, count in other.collectives.items():
            self.count(kind, times * count)


@dataclass(frozen=True, eq=False)
class _Transfer:
    """A collective under way."""

    part: str
    cost_s: float
    end_s: float
    kind: str = EXPOSED


_PASSING = _Transfer(OTHER, 0.0, 0.0)  # inside a loop, a transfer that began before it


@dataclass
class _Clocks:
    """Clocks of a walk through one computation; the clock of the core is `estimate.step_s`."""

    estimate: Estimate = field(default_factory=Estimate)
    free_s: dict[str, float] = field(default_factory=dict)
    """Times at which the links, and the network in either direction, are idle again."""
    under_way: dict[str, _Transfer] = field(default_factory=dict)
    """Transfers under way, by the name of the instruction that handed them on last."""
    parts: dict[tuple[str, int], _Transfer] = field(default_factory=dict)
    """Transfers under way, by the name and the place of a loop's, or a computation's, tuple."""
    ready_s: dict[str, float] = field(default_factory=dict)
    """Earliest times of results, by name: vector work waits for its operands alone, since the
    schedule may move it; products and kernels wait for their turn."""
    owed: dict[str, tuple[_Transfer, ...]] = field(default_factory=dict)
    """Transfers in one piece that a result still waits for, by its name."""
    awaited: set[_Transfer] = field(default_factory=set)

    def source(self, step: Instruction, holder: Computation) -> _Transfer | None:
        """The transfer that an instruction takes over, rather one that began here."""
        found = [t for name in step.operands if (t := self.holds(name, holder))]
        return next((t for t in found if t is not _PASSING), found[0] if found else None)

    def holds(self, name: str, holder: Computation) -> _Transfer | None:
        """The transfer of which a value is a part, seen through parts of tuples."""
        step = holder.by_name.get(name)
        while step is not None and step.opcode == "get-tuple-element":
            whole, place = step.operands[0], int(step.attribute("index") or 0)
            if (whole, place) in self.parts:
                return self.parts[whole, place]
            step = holder.by_name.get(whole)
        return None if step is None else self.under_way.get(step.name)

    def begin(
        self, part: str, cost_s: float, way: str = "links", ready_s: float | None = None,
        kind: str = EXPOSED,
    ) -> _Transfer:  # fmt: skip
        """Puts a transfer on its way, after those before it; now unless `ready_s` is earlier."""
        ready_s = self.estimate.step_s if ready_s is None else ready_s
        self.free_s[way] = max(self.free_s.get(way, 0.0), ready_s) + cost_s
        return _Transfer(part, cost_s, self.free_s[way], kind)

    def earliest(self, step: Instruction) -> float:
        """Earliest time at which all operands of an instruction are there."""
        return max((self.ready_s.get(name, 0.0) for name in step.operands), default=0.0)

    def hand_on(self, step: Instruction, seconds: float = 0.0) -> None:
        """Handles vector work and what costs nothing: the result waits for what its operands wait
        for."""
        self.ready_s[step.name] = self.earliest(step) + seconds
        owed = {t: None for name in step.operands for t in self.owed.get(name, ())}
        if owed:
            self.owed[step.name] = tuple(owed)

    def settle(self, transfers: Iterable[_Transfer]) -> None:
        """Waits for transfers in one piece that were not waited for yet."""
        for transfer in transfers:
            if transfer not in self.awaited:
                self.awaited.add(transfer)
                self.wait(transfer, IN_ONE_PIECE)

    def settle_operands(self, step: Instruction) -> None:
        """Waits for what a product or a kernel reads."""
        self.settle(t for name in step.operands for t in self.owed.get(name, ()))

    def wait(self, transfer: _Transfer, exposed: float = 0.0) -> None:
        """Moves the core's clock to the end of the transfer; `exposed` is the share of what could
        be hidden that is not."""
        wait = min(transfer.cost_s, max(0.0, transfer.end_s - self.estimate.step_s))
        wait += exposed * (transfer.cost_s - wait)
        self.estimate.spend(transfer.part, transfer.kind, wait)
        self.estimate.hidden_s += transfer.cost_s - wait


class _Walk:
    """One pass over a program."""

    def __init__(self, program: Program, where: Slice, rates: Rates):
        self.program, self.where, self.rates = program, where, rates
        self.peak = where.family.peak.bf16_flops
        per_chip = where.family.devices_per_chip
        self.network_bytes_per_s = where.family.network_bytes_per_s / per_chip
        self.frames = read_frames(program.text)
        self.products = Products(program, where.family.int8_units)

    def run(self, computation: Computation, passing: Iterable[int] = ()) -> Estimate:
        """The estimate of one execution, starting with idle links; `passing` are the places in its
        tuple of transfers that began before."""
        clocks = _Clocks()
        took = clocks.estimate
        whole = [i.name for i in computation.instructions if i.opcode == "parameter"]
        clocks.parts = {(name, place): _PASSING for name in whole for place in passing}
        for step in computation.instructions:
            if step.opcode in FREE:
                clocks.hand_on(step)
            elif step.opcode in ("while", "call", "conditional"):
                clocks.settle_operands(step)
                self._inner(clocks, step, computation)
                clocks.ready_s[step.name] = took.step_s
            elif step.opcode in NETWORK:
                cost = step.nbytes / self.network_bytes_per_s
                transfer = clocks.begin(self.part(step), cost, way=step.opcode)
                clocks.under_way[step.name] = transfer
                took.count(step.opcode, 1)
            elif (moved := self.collective(step, computation)) is not None:
                self._move(clocks, step, computation, *moved)
            elif (host := host_bytes(step, computation)) is not None:
                way, nbytes = host
                cost = nbytes / self.rates.host_bytes_per_s
                clocks.under_way[step.name] = clocks.begin(self.part(step), cost, way, kind=HOST)
                took.host_bytes += nbytes
            elif step.opcode.endswith("-done"):
                if transfer := clocks.source(step, computation):
                    clocks.wait(transfer)
                clocks.hand_on(step)
            elif step.opcode.endswith(("-start", "-update")):
                clocks.hand_on(step)  # copies to and from vector memory, behind arithmetic
            else:
                self._compute(clocks, step, computation)
        clocks.settle(dict.fromkeys(t for owed in clocks.owed.values() for t in owed))
        return took

    def _move(self, clocks: _Clocks, step, holder, kind, inner, inner_holder) -> None:
        """Handles a collective, or a fusion that starts one, computes while it runs, or ends it."""
        transfer = clocks.source(step, holder)
        if transfer is _PASSING and ("done" in step.name or "start" in step.name):
            transfer = None  # of a turn's own
        carries = transfer is not None and "done" not in step.name
        computes = carries or self.products.of(step, holder).flops > 0
        whole = transfer is None and not computes and "start" not in step.name
        if transfer is None:
            bandwidth = self.rates.link_bytes_per_s
            cost = transfer_s(kind, inner, inner_holder, self.where, bandwidth)
            if whole:  # what it sends may itself wait for others: the links keep their order
                transfer = clocks.begin(self.part(step), cost, ready_s=clocks.earliest(step))
            else:
                transfer = clocks.begin(self.part(step), cost)
            clocks.estimate.count(kind, 1)
        if computes:
            self._compute(clocks, step, holder)
        if carries or "start" in step.name:
            clocks.under_way[step.name] = transfer
        elif whole:
            clocks.ready_s[step.name] = transfer.end_s
            clocks.owed[step.name] = (transfer,)
        else:
            clocks.wait(transfer)

    def _inner(self, clocks: _Clocks, step: Instruction, holder: Computation) -> None:
        """Handles a loop, as often as it iterates, or the longest of several branches."""
        total = clocks.estimate
        if step.opcode != "while":
            branches = [self.run(self.program.computations[c]) for c in step.called]
            total.add(max(branches, key=lambda b: b.step_s), 1)
            return
        trips = self.program.trip_count(step, holder)
        if trips is None:
            total.unknown_loops += 1
        body = self.program.computations[step.callee("body")]
        given = holder.by_name[step.operands[0]].operands
        passing = {i: t for i, name in enumerate(given) if (t := clocks.holds(name, holder))}
        clocks.parts |= {(step.name, place): transfer for place, transfer in passing.items()}
        total.add(self.run(body, passing), 1 if trips is None else trips)

    def collective(
        self, step: Instruction, holder: Computation
    ) -> tuple[str, Instruction, Computation] | None:
        """(kind, instruction, its computation) where `step` moves data between chips: itself,
        or a fusion or `async-start` around it. An all-reduce of which a fusion keeps only a
        slice is a reduce-scatter."""
        kind = step.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return kind, step, holder
        if step.opcode not in ("fusion", "async-start"):
            return None
        for name in step.called:
            inner = self.program.computations[name]
            for inner_step in inner.instructions:
                kind = inner_step.opcode.removesuffix("-start")
                if kind in COLLECTIVES:
                    sliced = kind == "all-reduce" and step.nbytes < inner_step.nbytes
                    return ("reduce-scatter" if sliced else kind), inner_step, inner
        return None

    def part(self, step: Instruction) -> str:
        """Part of the model; for a fusion without a name, that of most instructions inside."""
        part = part_of(step, self.frames)
        if part != OTHER or step.opcode != "fusion":
            return part
        inside = Counter(
            part_of(inner, self.frames)
            for name in step.called
            for inner in self.program.computations[name].instructions
        )
        del inside[OTHER]
        return inside.most_common(1)[0][0] if inside else OTHER

    def _compute(self, clocks: _Clocks, step: Instruction, holder: Computation) -> None:
        work = self.products.of(step, holder)
        kind, seconds = self.compute_s(step, holder, work.needed)
        if kind in ("vector", "memory"):
            clocks.hand_on(step, seconds)
        else:
            clocks.settle_operands(step)
        took = clocks.estimate
        took.matmul_flops += work.flops
        took.spend(self.part(step), kind, seconds)
        if kind not in ("vector", "memory"):
            clocks.ready_s[step.name] = took.step_s

    def compute_s(self, step: Instruction, holder: Computation, flops: float) -> tuple[str, float]:
        """(kind, seconds) of an instruction that the core runs; `flops` are those that its products
        need."""
        share = self.rates.cycles_share
        by_cycles = (step.cycles or 0) / self.rates.clock_hz
        if flops and step.cycles is None:  # a kernel, or a product of which the compiler knows none
            moved = self.moved_bytes(step, holder) if step.opcode == "fusion" else 0
            by_flops = flops / (self.peak * self.rates.matmul_efficiency)
            return "matmul", max(by_flops, moved / self.rates.hbm_bytes_per_s)
        if flops:
            return "matmul", max(flops / self.peak, by_cycles / share)
        if "tpu_custom_call" in step.rest:
            return "attention", attention_s(step, holder, self.where.generation, self.rates)
        if step.opcode == "broadcast":  # its cycles are ten times what memory takes
            return "memory", step.nbytes / self.rates.hbm_bytes_per_s
        if step.cycles is not None:
            written = self.written_bytes(step) / self.rates.hbm_bytes_per_s
            return "vector", max(written, by_cycles / share)
        read = sum(holder.by_name[o].nbytes for o in step.operands if o in holder.by_name)
        moved = read + step.nbytes
        if moved < SCALAR_BYTES or step.opcode == "custom-call":
            return "memory", 0.0
        return "memory", moved / self.rates.hbm_bytes_per_s

    def moved_bytes(self, step: Instruction, holder: Computation) -> int:
        """Bytes that an instruction reads and writes, without buffers that it hands on."""
        handed_on = {int(number) for number in _ALIASED.findall(step.rest)}
        moved = memory_bytes(step.shape)
        for number, name in enumerate(step.operands):
            size = memory_bytes(holder.by_name[name].shape) if name in holder.by_name else 0
            moved += -size if number in handed_on else size
        return moved

    def written_bytes(self, step: Instruction) -> int:
        """Bytes that an instruction must write to memory; 0 if it may write a part in place."""
        inner = [i for name in step.called for i in self.program.computations[name].instructions]
        if any(inner_step.opcode in IN_PLACE for inner_step in (step, *inner)):
            return 0
        return memory_bytes(step.shape)


def estimate(program: Program, where: Slice, rates: Rates | None = None) -> Estimate:
    """The estimate of one step of the program on the slice; `rates` instead of the known."""
    walk = _Walk(program, where, rates or where.family.rates)
    return walk.run(program.computations[program.entry])
