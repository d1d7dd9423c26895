"""Cost: how long the compiled step takes, from the compiler's own schedule.

The program is walked in its order with two clocks: the TensorCore's, and that of the chip's
links, on which a `-start` puts its bytes and a `-done` waits for them. Loops count as often
as they turn. Costs of one instruction:

    matmul fusion       FLOPs / (peak x efficiency)
    other fusion        the compiler's cycles / clock
    splash attention    causal FLOPs / (peak x attention efficiency)
    collective          bytes a device receives / (links x bandwidth)
    what has no cycles  bytes / HBM bandwidth

Efficiencies and bandwidths are in `presets.hardware.RATES`; the estimate is as good as they.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from podsmith.plan.hlo import Computation, Instruction, Program, arrays
from podsmith.plan.topology import Slice
from podsmith.presets.hardware import RATES, peak_of

MATMULS = {"convolution", "dot"}
COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
        "partition-id", "replica-id", "opt-barrier"}  # fmt: skip
SCALAR_BYTES = 4096  # below, an instruction is bookkeeping


@dataclass
class Estimate:
    """Seconds of one step on one device, and where they go."""

    step_s: float = 0.0
    by_kind: Counter = field(default_factory=Counter)
    """matmul, attention, vector, memory, exposed collectives; they add up to `step_s`."""
    hidden_s: float = 0.0
    """Collectives behind arithmetic."""
    collectives: Counter = field(default_factory=Counter)
    """How often each kind runs in a step."""
    matmul_flops: float = 0.0
    """Of all matmul fusions, rematerialized ones too."""
    unknown_loops: int = 0
    """Loops whose turns could not be told; each was counted once."""


class _Walk:
    """One pass over a program."""

    def __init__(self, program: Program, where: Slice):
        self.program, self.where = program, where
        self.rates = RATES[where.generation]
        self.peak = peak_of(where.family.device_kind).bf16_flops
        self.inside: dict[str, float] = {}

    def run(self, computation: Computation) -> Estimate:
        """The estimate of one execution, starting with idle links."""
        found = Estimate()
        links_free, pending = 0.0, {}
        for step in computation.instructions:
            opcode = step.opcode
            kind = opcode.removesuffix("-start").removesuffix("-done")
            if opcode in FREE:
                continue
            if opcode == "while":
                self._loop(found, step, computation)
            elif opcode in ("call", "conditional"):
                branches = [self.run(self.program.computations[c]) for c in step.called]
                _add(found, max(branches, key=lambda b: b.step_s), 1)
            elif kind in COLLECTIVES and opcode.endswith("-done"):
                end, cost = pending.pop(step.operands[0], (0.0, 0.0))
                wait = min(cost, max(0.0, end - found.step_s))
                self._spend(found, "exposed collectives", wait)
                found.hidden_s += cost - wait
            elif kind in COLLECTIVES:
                cost = self.transfer_s(step, kind, computation)
                found.collectives[kind] += 1
                links_free = max(links_free, found.step_s) + cost
                if opcode.endswith("-start"):
                    pending[step.name] = links_free, cost
                else:
                    self._spend(found, "exposed collectives", links_free - found.step_s)
            elif opcode.endswith(("-start", "-done")):
                continue  # copies to and from vector memory, behind arithmetic
            else:
                name, seconds = self.compute_s(step, computation, found)
                self._spend(found, name, seconds)
        return found

    def _loop(self, found: Estimate, step: Instruction, holder: Computation) -> None:
        trips = self.program.trip_count(step, holder)
        if trips is None:
            found.unknown_loops += 1
        body = self.program.computations[step.callee("body")]
        _add(found, self.run(body), 1 if trips is None else trips)

    def _spend(self, found: Estimate, kind: str, seconds: float) -> None:
        found.step_s += seconds
        found.by_kind[kind] += seconds

    def compute_s(self, step: Instruction, holder: Computation, found: Estimate):
        """(kind, seconds) of an instruction that the core runs."""
        flops = self.matmul_flops(step, holder)
        if flops:
            found.matmul_flops += flops
            return "matmul", flops / (self.peak * self.rates.matmul_efficiency)
        if "tpu_custom_call" in step.rest:
            return "attention", attention_flops(step, holder) / (
                self.peak * self.rates.attention_efficiency
            )
        if step.cycles is not None:
            return "vector", step.cycles / self.rates.clock_hz
        read = sum(holder.by_name[o].nbytes for o in step.operands if o in holder.by_name)
        moved = read + step.nbytes
        if moved < SCALAR_BYTES or step.opcode == "custom-call":
            return "memory", 0.0
        return "memory", moved / self.rates.hbm_bytes_per_s

    def matmul_flops(self, step: Instruction, holder: Computation) -> float:
        """FLOPs of the matmuls in an instruction and in what it calls."""
        if step.opcode in MATMULS:
            return matmul_flops(step, holder)
        if step.opcode != "fusion":
            return 0.0
        total = 0.0
        for name in step.called:
            if name not in self.inside:
                inner = self.program.computations[name]
                self.inside[name] = sum(self.matmul_flops(i, inner) for i in inner.instructions)
            total += self.inside[name]
        return total

    def transfer_s(self, step: Instruction, kind: str, holder: Computation) -> float:
        """Seconds that a collective's bytes need on the links of one device."""
        given = sum(holder.by_name[o].nbytes for o in step.operands if o in holder.by_name)
        if kind == "collective-permute":
            return given / self.rates.link_bytes_per_s
        group = group_size(step, self.where.num_devices)
        share = (group - 1) / max(group, 1)
        received = {
            "all-gather": step.nbytes * share if step.opcode == kind else given * (group - 1),
            "reduce-scatter": given * share,
            "all-reduce": 2 * given * share,
            "all-to-all": given * share / 2,
        }[kind]
        return received / (self.links(group) * self.rates.link_bytes_per_s)

    def links(self, group: int) -> int:
        """Links a device of a group of this size receives on: both ways along each torus
        axis, of which a group smaller than the slice is taken to span one."""
        sides = [side for side in self.where.shape if side > 1]
        if group < math.prod(self.where.shape):
            return 2
        return max(1, sum(2 if side > 2 else 1 for side in sides))


def estimate(program: Program, where: Slice) -> Estimate:
    """The estimate of one step of the program on the slice."""
    return _Walk(program, where).run(program.computations[program.entry])


def _add(found: Estimate, other: Estimate, times: int) -> None:
    found.step_s += times * other.step_s
    found.hidden_s += times * other.hidden_s
    found.matmul_flops += times * other.matmul_flops
    found.unknown_loops += other.unknown_loops
    for name in ("by_kind", "collectives"):
        for key, value in getattr(other, name).items():
            getattr(found, name)[key] += times * value


def matmul_flops(step: Instruction, holder: Computation) -> float:
    """2 m k n of a matmul without batch dimensions: m k, k n and m n are the sizes of its
    operands and its result."""
    sizes = [_elements(holder.by_name[name].shape) for name in step.operands[:2]]
    return 2 * math.sqrt(math.prod(sizes) * _elements(step.shape))


def attention_flops(step: Instruction, holder: Computation) -> float:
    """Causal FLOPs of a splash kernel, from its queries [B, N, T, H] and its name."""
    queries = [
        dims
        for name in step.operands
        if name in holder.by_name
        for _, dims in arrays(holder.by_name[name].shape)
        if len(dims) == 4
    ]
    if not queries or "splash" not in step.name + step.op_name:
        return 0.0
    b, n, t, h = max(queries, key=math.prod)
    t, h = max(t, h), min(t, h)  # either may be the minor one
    fused = any(len(dims) == 5 for _, dims in arrays(step.shape))
    matmuls = 2 if "fwd" in step.name else 5 if fused else 4 if "dkv" in step.name else 3
    return matmuls * 2 * b * n * t * t * h / 2


def group_size(step: Instruction, devices: int) -> int:
    """Devices that take part in a collective together; all of them if it does not say."""
    text = step.rest.split("replica_groups=")[-1] if "replica_groups=" in step.rest else ""
    if text.startswith("mesh["):  # mesh['a'=2,'b'=8] {'b'}: the named axes
        sizes = {k: int(v) for k, v in re.findall(r"'(\w+)'=(\d+)", text.split("]")[0])}
        named = re.findall(r"'(\w+)'", text.split("]")[1].split("}")[0])
        return math.prod(sizes[name] for name in named)
    if match := re.match(r"\[(\d+),(\d+)\]", text):  # [groups, members]<=[...]
        return int(match[2])
    if match := re.match(r"\{\{([\d,]+)\}", text):
        return len(match[1].split(","))
    return devices


def _elements(shape: str) -> int:
    return sum(math.prod(dims) for _, dims in arrays(shape))
