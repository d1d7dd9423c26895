"""Report: what a compiled plan says, for people and as plan.json."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from podsmith.plan.compile import Compiled
from podsmith.plan.topology import Slice
from podsmith.presets.hardware import GIB, peak_of
from podsmith.run import Run


@dataclass(frozen=True)
class Report:
    """A run, a slice, and the compiler's answer for the two."""

    run: Run
    where: Slice
    compiled: Compiled

    @property
    def limit_bytes(self) -> int:
        """HBM of one device that a program may use."""
        peak = peak_of(self.where.family.device_kind)
        return self.compiled.limit_bytes or peak.usable_bytes or peak.hbm_bytes

    @cached_property
    def parts(self) -> dict[str, int]:
        """Bytes of one device by what they are for, adding up to the peak."""
        c = self.compiled
        parts = {"weights": c.weights_bytes, "optimizer": c.optimizer_bytes}
        rest = "gradients, saved activations, temporaries"
        return parts | {rest: c.peak_bytes - sum(parts.values())}

    @property
    def least_step_s(self) -> float:
        """Seconds in which the chips' peak could do the step's arithmetic; no step is faster."""
        peak = peak_of(self.where.family.device_kind).bf16_flops * self.where.num_devices
        return self.compiled.flops_per_step / peak

    def to_json(self) -> str:
        """plan.json: every number, in bytes, seconds and FLOPs."""
        numbers = {k: v for k, v in asdict(self.compiled).items() if k != "hlo"}
        tokens = self.compiled.tokens_per_step * self.run.train.steps
        return json.dumps(
            numbers
            | {
                "chips": self.where.num_chips,
                "devices": self.where.num_devices,
                "hbm_limit_bytes": self.limit_bytes,
                "least_step_s": self.least_step_s,
                "steps": self.run.train.steps,
                "tokens": tokens,
            },
            indent=1,
        )

    def lines(self) -> list[str]:
        """The report as lines of text."""
        c, where = self.compiled, self.where
        shape = "x".join(map(str, where.shape))
        mesh = ", ".join(f"{axis} {size}" for axis, size in c.mesh.items() if size > 1)
        lines = [
            f"{self.run.name} on {where.name}: {where.num_chips} chips"
            f" ({where.num_slices} x {shape}), mesh {mesh or 'of one device'}",
            f"{c.num_params:,} parameters, {c.tokens_per_step:,} tokens a step, "
            f"remat {self.run.train.remat}",
            "",
            self._verdict(),
        ]
        lines += [f"  {size / GIB:8.2f} GiB  {name}" for name, size in self.parts.items()]
        per_device = "a device" if where.family.devices_per_chip > 1 else "a chip"
        lines += [f"  {c.peak_bytes / GIB:8.2f} GiB  {per_device}, by the TPU compiler", ""]
        least = self.least_step_s
        hours = least * self.run.train.steps / 3600
        lines += [
            f"no step is faster than {least:.3g} s ({c.tokens_per_step / least:,.0f} tokens/s): "
            f"{c.flops_per_step:.3g} FLOPs at the chips' peak",
            f"{self.run.train.steps:,} steps: {c.tokens_per_step * self.run.train.steps:,} tokens, "
            f"at least {hours:.3g} hours, {hours * where.num_chips:.3g} chip-hours",
            f"compiled in {c.compile_s:.0f} s",
        ]
        return lines

    def _verdict(self) -> str:
        used, limit = self.compiled.peak_bytes / GIB, self.limit_bytes / GIB
        if self.compiled.fits:
            return f"FITS: {used:.2f} of {limit:.2f} GiB"
        text = f"DOES NOT FIT: {used:.2f} of {limit:.2f} GiB, {used - limit:.2f} GiB too much"
        return f"{text}; {self._cure()}" if self._cure() else text

    def _cure(self) -> str:
        state = self.compiled.weights_bytes + self.compiled.optimizer_bytes
        if state > self.limit_bytes:
            return (
                f"weights and optimizer alone take {state / GIB:.2f} GiB a device: more chips, "
                f"or optim.kind = adam8bit or adafactor"
            )
        if self.run.train.remat != "block":
            return 'try train.remat = "block"'
        rows = self.run.train.global_batch_size // self.run.train.num_microbatches
        if rows > self.where.num_devices:
            return f"try train.num_microbatches={2 * self.run.train.num_microbatches}"
        return "try fewer tokens a row, or more chips"


def write_report(report: Report, folder: Path) -> Path:
    """Writes plan.json below `folder`; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    path.write_text(report.to_json())
    return path
