"""Quick: the analytic answer to `lmwright plan --quick`, in well under a second; for GPUs also with
the memory of a compiler, whose programs say no times.

    Run, Machine --layout--> Layout --memory, step_time--> Quick --> text, JSON

The verdict and the time come with the error that was observed for the model.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lmwright.config.run import Run
from lmwright.hardware.chips import GIB
from lmwright.planner.analytic.layout import Layout, on_paper
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.memory import Memory, memory, teacher_lines
from lmwright.planner.analytic.step_time import HOST, error_share, gpu_error_share, timing
from lmwright.planner.analytic.tensors import Tensor, tensor_lines, tensors, tensors_json
from lmwright.planner.analytic.timing import Timing
from lmwright.planner.cost import RunCost
from lmwright.planner.own_machine import factor_of
from lmwright.planner.units import (
    bus_line,
    duration,
    fits_host,
    host_lines,
    memory_size,
    mesh_text,
    saves_text,
    short_duration,
)
from lmwright.program.plan import Plan

if TYPE_CHECKING:
    from lmwright.planner.advice import Advice
    from lmwright.planner.compiler.compile import Compiled

MEMORY_ERROR_SHARE = 0.2
"""Largest error of the memory estimate against the compiler on the rows of
`benchmarks/plan_quick.py`, but for a model of 7M parameters."""

ON_CARD_SHARE = 0.05
"""Most that a step on a GPU takes beyond what the compiler says of its program: 4 % of earlier
programs, 0.3 % of four of today's (`benchmarks/plan_gpu.py --compile`)."""


@dataclass(frozen=True)
class Quick:
    """A run on a machine, and what the analytic model says of it, its memory perhaps by a
    compiler."""

    run: Run
    machine: Machine
    plan: Plan
    compiled: "Compiled | None" = None
    """The compiler's answer, whose memory is then that of the verdict."""

    @classmethod
    def of(cls, run: Run, machine: Machine, compiled: "Compiled | None" = None) -> "Quick":
        """The analytic answer. Raises UserError where the run cannot be laid out on the machine."""
        return cls(run, machine, on_paper(run, machine), compiled)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each model of the objective."""
        return Layout.of(self.plan)

    @cached_property
    def memory(self) -> Memory:
        return memory(self.layouts, self.limit_bytes)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Tensors that the backward pass reads, the largest first."""
        return tensors(self.layouts)

    @cached_property
    def timing(self) -> Timing:
        """The predicted timing, times the factor stored for this machine."""
        took = timing(self.layouts, self.machine)
        return took if self.factor is None else took.times(self.factor)

    @property
    def factor(self) -> float | None:
        """Ratio of measured runs to the prediction on this very machine; None without a
        measurement."""
        factor = factor_of(self.machine.name)
        return None if factor is None else factor.quick

    @property
    def limit_bytes(self) -> int | None:
        """Memory of one device that a program may use; None where it is the host's."""
        return self.machine.usable_bytes

    @property
    def peak_bytes(self) -> float:
        """Bytes of a device at the fullest moment of a step."""
        return self.compiled.peak_bytes if self.compiled else self.memory.peak

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of a device by what they are for, adding up to the peak."""
        if (c := self.compiled) is None:
            return self.memory.parts()
        given = {"weights": c.weights_bytes, "optimizer": c.optimizer_bytes}
        return {**given, "activations and temporaries": c.peak_bytes - sum(given.values())}

    @property
    def over_bytes(self) -> float:
        """Bytes by which the run is too large for a device; negative if it fits."""
        return self.peak_bytes - self.limit_bytes if self.limit_bytes else -1.0

    @property
    def fits(self) -> bool:
        """True if the device, and the host where something is put there, have the memory."""
        return self.over_bytes <= 0 and fits_host(self.memory.host, self.machine.host_memory_bytes)

    @property
    def is_close(self) -> bool:
        """True if the error of the model, or of the compiler, could change the verdict."""
        limit, share = self.limit_bytes, ON_CARD_SHARE if self.compiled else MEMORY_ERROR_SHARE
        return limit is not None and abs(self.over_bytes) < share * limit

    @property
    def step_s(self) -> float:
        return self.timing.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.plan.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float | None:
        """MFU: model FLOPs without recomputation over peak FLOPs; None if the peak is unknown."""
        if self.machine.platform == "cpu":
            return None
        peak = self.machine.flops * self.machine.num_devices
        return self.plan.flops_per_step / peak / self.step_s

    @property
    def error_share(self) -> float:
        """Half the width of the interval around the step time."""
        if self.machine.platform == "gpu":
            return gpu_error_share(self.timing, self.machine, self.run)
        return error_share(self.machine.kind, self.run, compiled=False)

    def to_json(self, cost: RunCost, advice: "Advice | None" = None) -> str:
        """The answer for plan.json: every number, in bytes, seconds and FLOPs."""
        numbers = {
            "by": "analytic",
            "slice": self.machine.name,
            "chips": self.machine.num_chips,
            "devices": self.machine.num_devices,
            "mesh": dict(self.plan.mesh.shape),
            "remat": self.run.train.fixed_remat,
            "num_params": self.plan.num_params,
            "tokens_per_step": self.plan.tokens_per_step,
            "flops_per_step": self.plan.flops_per_step,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "compile_s": self.compiled.compile_s if self.compiled else None,
            "limit_bytes": self.limit_bytes,
            "memory_by": "compiler" if self.compiled else "analytic",
            "memory": asdict(self.memory) if self.compiled is None else self.parts,
            "memory_error_share": None if self.compiled else MEMORY_ERROR_SHARE,
            "step_s": self.step_s,
            "step_error_share": self.error_share,
            "by_kind_s": dict(self.timing.by_kind),
            "by_part_s": dict(self.timing.by_part),
            "hidden_s": self.timing.hidden_s,
            "host_transfer_bytes": self.timing.host_bytes,
            "tensors": tensors_json(self.tensors),
            "mfu": self.mfu,
            "factor": self.factor,
            "takes": cost.to_json(),
            "advice": advice.to_json() if advice else None,
        }
        return json.dumps(numbers, indent=1)

    def lines(self, cost: RunCost) -> list[str]:
        """The answer as lines of text."""
        train = self.run.train
        pieces = f", {train.num_microbatches} microbatches" if train.num_microbatches > 1 else ""
        lines = [
            f"{self.run.name} on {self.machine.name}: {machine_text(self.machine)}, "
            f"mesh {mesh_text(dict(self.plan.mesh.shape))}",
            f"{self.plan.num_params:,} parameters, {self.plan.tokens_per_step:,} tokens a step, "
            f"{saves_text(train)}{pieces}, {self.run.optim.kind}",
            "",
            self.verdict(),
        ]
        parts, peak = self.parts, self.peak_bytes
        lines += [f"  {memory_size(size, peak, 8)}  {name}" for name, size in parts.items() if size]
        lines += teacher_lines(self.layouts)
        lines += host_lines(self.memory.host, self.machine.host_memory_bytes)
        took = self.timing
        if took.host_bytes:
            rate, exposed = self.machine.host_bytes_per_s, took.by_kind[HOST]
            lines.append(bus_line(took.host_bytes, self.step_s, rate, exposed))
        lines += ["", *tensor_lines(self.tensors)[:-1]]
        if not self.fits:
            return [*lines, "", *self.would_take(cost), "", *self._unknown()]
        lines += ["", f"predicted: {self._speed()}"]
        kinds = sorted(self.timing.by_kind.items(), key=lambda item: -item[1])
        lines += [f"  {duration(seconds, self.step_s, 8)}  {kind}" for kind, seconds in kinds]
        if self.timing.hidden_s:
            hidden = duration(self.timing.hidden_s, self.step_s, 8)
            lines.append(f"  {hidden}  transfers hidden, not added")
        shares = ", ".join(
            f"{name} {duration(seconds, self.step_s)}"
            for name, seconds in self.timing.by_part.most_common()
        )
        return [*lines, f"  products by part: {shares}", *cost.lines(), "", *self._unknown()]

    def would_take(self, cost: RunCost) -> list[str]:
        """The speed of a run that does not fit, if it did."""
        return [f"if it did fit, it would take {self._speed()}", *cost.lines()[:2]]

    def verdict(self) -> str:
        """Sentence on whether the run fits, and how certain that is."""
        used, error = self.peak_bytes, f"give or take {MEMORY_ERROR_SHARE:.0%}"
        if self.compiled:
            error = "by the compiler for CUDA"
        if self.limit_bytes is None:
            return f"NEEDS {memory_size(used)} of the host's memory, {error}"
        text = (
            f"{memory_size(used).removesuffix(' GiB')} of {self.limit_bytes / GIB:.2f} GiB, {error}"
        )
        close = f"; this close, only the {'card' if self.compiled else 'compiler'} can tell"
        close = close if self.is_close else ""
        if self.fits:
            return f"FITS: {text}{close}"
        if self.over_bytes <= 0:
            return f"DOES NOT FIT THE HOST: {text} on a device"
        return f"DOES NOT FIT: {text}: {self.over_bytes / GIB:.2f} GiB too much{close}"

    def _speed(self) -> str:
        a_chip = self.tokens_per_s / self.machine.num_chips
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.0%}"
        return (
            f"{short_duration(self.step_s)} a step, give or take {self.error_share:.0%}; "
            f"{self.tokens_per_s:,.0f} tokens/s, {a_chip:,.0f} a {self.machine.unit}{mfu}"
        )

    def _unknown(self) -> list[str]:
        lines = ["by the analytic model; no compiler was asked"]
        if self.compiled:
            lines = [
                f"compiled in {self.compiled.compile_s:.0f} s; the times are those of the analytic "
                "model"
            ]
        if self.factor is not None:
            lines.append(factor_of(self.machine.name).note(self.machine.name, self.factor))
        if self.run.train.compiler_options:
            lines.append("train.compiler_options: what they change is not in this answer")
        if self.plan.compute.kernels == "reference":
            lines.append("attention without a kernel: the estimate includes whole score matrices")
        if self.machine.platform == "gpu":
            lines.append(f"efficiencies of {self.machine.name} are assumed, not measured")
        if (share := self.machine.packed_share) is not None:
            lines.append(
                f"attention takes {share:.2f} of what it does in rows of one document, by rows of "
                f"{self.run.data.dir}"
            )
        if self.machine.platform == "cpu" and self.factor is None:
            lines.append("rates of one measured machine; others differ by a factor of two and more")
        return lines


def machine_text(machine: Machine) -> str:
    """Description of the parts of a machine."""
    groups = {"tpu": "slices", "gpu": "nodes"}.get(machine.platform, "")
    text = f"{machine.num_chips} {machine.unit}{'s' if machine.num_chips > 1 else ''}"
    return f"{text} in {machine.num_groups} {groups}" if machine.num_groups > 1 else text
