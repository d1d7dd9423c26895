"""Report: what a compiled plan says, for people and as plan.json."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.guard.temporary import write_output
from lmwright.hardware.chips import GIB
from lmwright.hardware.slices import Slice
from lmwright.planner.analytic.machine import machine_of
from lmwright.planner.analytic.memory import teacher_lines
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.analytic.step_time import error_share
from lmwright.planner.analytic.tensors import Tensor, tensor_lines, tensors_json
from lmwright.planner.compiler.buffers import Buffer, largest_buffers
from lmwright.planner.compiler.compile import Compiled
from lmwright.planner.compiler.cost import HOST, Estimate, estimate
from lmwright.planner.compiler.hlo import Program, parse
from lmwright.planner.compiler.peak import GRADIENTS, SAVED, TEMPORARIES, peak_split
from lmwright.planner.compiler.timeline import Timeline
from lmwright.planner.cost import RunCost
from lmwright.planner.own_machine import factor_of
from lmwright.planner.page import Chart
from lmwright.planner.phases import phases_of, tokens_until
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

if TYPE_CHECKING:
    from lmwright.planner.advice import Advice

MIN_SHARE = 0.005  # of the step; smaller entries are left out
MIN_BUFFER_BYTES = GIB // 100


@dataclass(frozen=True)
class Report:
    """A run, a slice, and the compiler's answer for the two."""

    run: Run
    where: Slice
    compiled: Compiled

    @property
    def limit_bytes(self) -> int:
        """HBM of one device that a program may use."""
        peak = self.where.family.peak
        return self.compiled.limit_bytes or peak.usable_bytes or peak.hbm_bytes

    @property
    def fits(self) -> bool:
        """True if the chip, and the host where something is put there, have the memory."""
        return self.compiled.fits and fits_host(self.compiled.host_bytes, self.host_memory_bytes)

    @property
    def host_memory_bytes(self) -> float:
        """Memory of the host for each device."""
        return self.where.family.host_gib * GIB / self.where.family.devices_per_chip

    @cached_property
    def parts(self) -> dict[str, int]:
        """Bytes of one device by what they are for, adding up to the peak."""
        c = self.compiled
        parts = {"weights": c.weights_bytes, "optimizer": c.optimizer_bytes}
        rest = c.peak_bytes - sum(parts.values())
        if self.program is None:
            return parts | {f"{GRADIENTS}, {SAVED}, {TEMPORARIES}": rest}
        split = peak_split(self.program)
        known = {name: split[name] for name in (GRADIENTS, SAVED)}
        if sum(known.values()) > rest:  # by our account more is alive than by the compiler's
            known = {name: int(size * rest / sum(known.values())) for name, size in known.items()}
        return parts | known | {TEMPORARIES: rest - sum(known.values())}

    @cached_property
    def estimate(self) -> Estimate | None:
        """Estimate of the step, scaled by the ratio stored for this machine; None if nothing was
        compiled."""
        if self.program is None:
            return None
        took = estimate(self.program, self.where)
        return took if self.factor is None else took.times(self.factor)

    @property
    def factor(self) -> float | None:
        """Ratio of measured runs to the compiler's prediction on this slice; None without a
        measurement."""
        factor = factor_of(self.where.name)
        return None if factor is None else factor.compiler

    @cached_property
    def program(self) -> Program | None:
        """The compiled program; None where nothing was compiled."""
        return parse(self.compiled.hlo) if self.compiled.hlo else None

    @cached_property
    def buffers(self) -> list[Buffer]:
        """The program's largest arrays."""
        return largest_buffers(self.program) if self.program else []

    @cached_property
    def quick(self) -> Quick:
        """Answer of the analytic model."""
        return Quick.of(self.run, machine_of(self.where))

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Tensors that the backward pass reads, by the shapes of the run."""
        return self.quick.tensors

    def chart(self) -> Chart | None:
        """The memory over a step; None where nothing was compiled."""
        if self.program is None:
            return None
        state = self.compiled.weights_bytes + self.compiled.optimizer_bytes
        return Chart.of(Timeline.of(self.program), state)

    @property
    def mfu(self) -> float | None:
        """MFU: model FLOPs without recomputation over peak FLOPs."""
        return self.least_step_s / self.estimate.step_s if self.estimate else None

    @property
    def least_step_s(self) -> float:
        """Seconds in which the chips' peak could do the step's arithmetic; no step is faster."""
        peak = self.where.family.peak.bf16_flops * self.where.num_devices
        return self.compiled.flops_per_step / peak

    def to_json(self, cost: RunCost | None = None, advice: "Advice | None" = None) -> str:
        """The report for plan.json: every number, in bytes, seconds and FLOPs."""
        numbers = {k: v for k, v in asdict(self.compiled).items() if k != "hlo"}
        phases = phases_of(self.run)
        steps = phases[-1].stop
        return json.dumps(
            numbers
            | {
                "by": "compiler",
                "remat": self.run.train.fixed_remat,
                "limit_bytes": self.limit_bytes,
                "memory_by": "compiler",
                "memory": self.parts,
                "step_s": self.estimate.step_s if self.estimate else None,
                "chips": self.where.num_chips,
                "devices": self.where.num_devices,
                "hbm_limit_bytes": self.limit_bytes,
                "least_step_s": self.least_step_s,
                "mfu": self.mfu,
                "peak": self.parts,
                "estimate": asdict(self.estimate) if self.estimate else None,
                "factor": self.factor,
                "tensors": tensors_json(self.tensors),
                "buffers": [asdict(buffer) for buffer in self.buffers],
                "steps": steps,
                "tokens": tokens_until(phases, steps, self.compiled.tokens_per_step),
                "takes": cost.to_json() if cost else None,
                "advice": advice.to_json() if advice else None,
            },
            indent=1,
        )

    def lines(self, cost: RunCost | None = None) -> list[str]:
        """The report as lines of text."""
        c, where = self.compiled, self.where
        shape = "x".join(map(str, where.shape))
        lines = [
            f"{self.run.name} on {where.name}: {where.num_chips} chips"
            f" ({where.num_slices} x {shape}), mesh {mesh_text(c.mesh)}",
            f"{c.num_params:,} parameters, {c.tokens_per_step:,} tokens a step, "
            f"{saves_text(self.run.train)}",
            "",
            self._verdict(),
        ]
        lines += [
            f"  {memory_size(size, c.peak_bytes, 8)}  {name}" for name, size in self.parts.items()
        ]
        per_device = "a device" if where.family.devices_per_chip > 1 else "a chip"
        lines += [f"  {memory_size(c.peak_bytes, width=8)}  {per_device}, by the TPU compiler"]
        lines += teacher_lines(self.quick.layouts)
        lines += [*host_lines(c.host_bytes, self.host_memory_bytes), *self._bus(), ""]
        lines += tensor_lines(self.tensors)
        lines += buffer_lines(self.buffers)
        lines += self._time() if self.estimate else []
        lines += [*cost.lines(), ""] if cost else []
        least = self.least_step_s
        lines += [
            f"no step is faster than {short_duration(least)} "
            f"({c.tokens_per_step / least:,.0f} tokens/s): "
            f"{c.flops_per_step:.3g} FLOPs at the chips' peak",
            f"compiled in {c.compile_s:.0f} s"
            + (", by an earlier plan" if c.from_cache else "")
            + ("; the step is kept for train" if c.step_kept else ""),
        ]
        if self.factor is not None:
            lines.append(factor_of(where.name).note(where.name, self.factor))
        return lines

    def _bus(self) -> list[str]:
        took = self.estimate
        if took is None or not took.host_bytes:
            return []
        rate, exposed = self.where.family.rates.host_bytes_per_s, took.by_kind.get(HOST, 0.0)
        return [bus_line(took.host_bytes, took.step_s, rate, exposed)]

    def _time(self) -> list[str]:
        took, c = self.estimate, self.compiled
        error = error_share(self.where.generation, self.run, compiled=True)
        lines = [
            f"predicted: {short_duration(took.step_s)} a step, give or take {error:.0%}; "
            f"{c.tokens_per_step / took.step_s:,.0f} tokens/s, MFU {self.mfu:.0%}"
        ]
        for kind, seconds in sorted(took.by_kind.items(), key=lambda item: -item[1]):
            lines.append(f"  {duration(seconds, took.step_s, 8)}  {kind}")
        hidden = duration(took.hidden_s, took.step_s, 8)
        lines.append(f"  {hidden}  transfers hidden behind arithmetic, not added")
        return [*lines, *part_lines(took)]

    def _verdict(self) -> str:
        used, limit = self.compiled.peak_bytes / GIB, self.limit_bytes / GIB
        if self.compiled.fits:
            small = memory_size(self.compiled.peak_bytes).removesuffix(" GiB")
            verdict = "FITS" if self.fits else "DOES NOT FIT THE HOST"
            return f"{verdict}: {small} of {limit:.2f} GiB"
        return f"DOES NOT FIT: {used:.2f} of {limit:.2f} GiB, {used - limit:.2f} GiB too much"


def part_lines(took: Estimate) -> list[str]:
    """Seconds of each part of the model, the largest first, and what they go to."""
    lines = []
    least = MIN_SHARE * took.step_s
    for part, kinds in sorted(took.by_part.items(), key=lambda item: -sum(item[1].values())):
        total = sum(kinds.values())
        if total >= least:
            shown = sorted(((s, k) for k, s in kinds.items() if s >= least), reverse=True)
            of = ", ".join(
                f"{duration(seconds, took.step_s).split()[0]} {kind}" for seconds, kind in shown
            )
            lines.append(f"  {duration(total, took.step_s, 8)}  {part}: {of}")
    return ["by part:", *lines]


def buffer_lines(buffers: list[Buffer]) -> list[str]:
    """The largest buffers; nothing where none is worth a line."""
    lines = [
        f"  {b.nbytes / GIB:8.2f} GiB  {b.part}: {b.shape}"
        for b in buffers
        if b.nbytes >= MIN_BUFFER_BYTES
    ]
    return ["largest buffers, not all alive at once:", *lines, ""] if lines else []


def write_plan(text: str, folder: Path) -> Path:
    """Writes plan.json below `folder`; returns its path. A folder that is made for it goes where
    that fails."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {folder}: cannot be made ({error.strerror}); name another"
        ) from None
    path = folder / "plan.json"
    try:
        write_output(path, text)
    except OSError:
        if new:
            folder.rmdir()
        raise
    return path
