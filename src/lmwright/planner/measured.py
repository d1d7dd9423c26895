"""Measured: a run that happened beside its prediction.

RUN: run.toml, env.json, plan.json, metrics.jsonl, sessions.json, checkpoints/ --> Measured
run, machine --compiler or analytic model--> Predicted                         --> table
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lmwright.config.run import UNCHOSEN, Run
from lmwright.core.compute import REMATS
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.hardware.devices import chip_of, gpu_name
from lmwright.hardware.slices import names_of
from lmwright.planner.analytic.machine import Machine, parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.analytic.remat import settled
from lmwright.planner.analytic.step_time import timing
from lmwright.planner.compiler.compile import compile_for, has_libtpu
from lmwright.planner.compiler.cost import estimate
from lmwright.planner.compiler.gpu import has_cuda_compiler
from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.profile import by_part
from lmwright.planner.cost import checkpoint_bytes, disk
from lmwright.planner.packed import with_documents
from lmwright.planner.sessions import assumed_save_s
from lmwright.planner.units import memory_size, short_duration
from lmwright.program.length import completed
from lmwright.program.plan import resolve
from lmwright.report.ledger import usual_save_s
from lmwright.report.profile import newest_profile, seconds_by_instruction
from lmwright.report.read import RunRecord, read_run


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured speed and size of a run directory; None where nothing was measured."""

    step_s: float
    steps: int
    """Number of logged values that the step time is the median of."""
    input_wait_s: float | None
    """Seconds of a step that waits for input."""
    memory_bytes: float | None
    compile_s: float | None
    by_plan: bool
    """True if `plan` had compiled the step."""
    save_s: float | None
    """Seconds until a whole checkpoint is written."""
    blocked_s: float | None
    """Seconds of it for which training waits."""
    checkpoint_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Plan's prediction for the same run."""

    by: str
    """Source of the times: `quick` or `compiler`."""
    step_s: float
    memory_by: str
    """Source of the memory: `quick` or `compiler`, which says no times for GPUs."""
    memory_bytes: float
    compile_s: float | None
    save_s: float
    checkpoint_bytes: int
    by_part: dict[str, float]
    """Seconds of parts of the model: of all by the compiler, of their products by quick."""


def measured(record: RunRecord) -> Measured:
    """Measured speed and size of a run. Raises UserError where no step was timed."""
    speed, tokens = record.train.get("tokens_per_s"), record.plan.get("tokens_per_step")
    if speed is None or not tokens or not any(v > 0 for v in speed.values):
        raise UserError(f"{record.dir}: no step was timed; train a few more steps")
    starts = {speed.steps[0], *record.resumes}
    timed = [(s, tokens / v) for s, v in zip(speed.steps, speed.values, strict=True) if v > 0]
    timed = [pair for pair in timed if pair[0] in _whole_steps(record, tokens)] or timed
    settled = [pair for pair in timed if not _follows_start(pair[0], speed.steps, starts)] or timed
    step_s = statistics.median(seconds for _, seconds in settled)
    share = record.train.get("input_wait_share")
    memory = record.train.get("peak_memory_bytes")
    compiles = [event for event in record.events if event["kind"] == "compile"]
    saves = [event for event in record.events if event["kind"] == "checkpoint"]
    return Measured(
        step_s=step_s,
        steps=len(settled),
        input_wait_s=None if share is None else step_s * statistics.median(share.values),
        memory_bytes=None if memory is None else max(memory.values),
        compile_s=_median(compiles, "seconds"),
        by_plan=bool(compiles and compiles[-1].get("by_plan")),
        save_s=usual_save_s(record.sessions),
        blocked_s=_median(saves, "blocked_s"),
        checkpoint_bytes=_newest_bytes(record.dir),
    )


def _whole_steps(record: RunRecord, tokens: int) -> set[int]:
    """Logged steps before which every step had so many tokens, as the one that is predicted: of a
    run of several adapters, those before the first adapter ended."""
    seen = record.train.get("tokens_seen")
    points = zip(seen.steps, seen.values, strict=True) if seen is not None else ()
    return {step for step, value in points if value >= step * tokens}


def _follows_start(step: int, steps: list[int], starts: set[int]) -> bool:
    """True if a logged value is the first after a start."""
    before = [s for s in steps if s < step]
    return not before or any(before[-1] <= start < step for start in starts - {steps[0]})


def _median(events: list[Mapping[str, Any]], name: str) -> float | None:
    values = [event[name] for event in events if isinstance(event.get(name), int | float)]
    return statistics.median(values) if values else None


def _newest_bytes(folder: Path) -> int | None:
    saved = [p for p in (folder / "checkpoints").glob("*") if p.name.isdigit()]
    if not saved:
        return None
    newest = max(saved, key=lambda p: int(p.name))
    return sum(p.stat().st_size for p in newest.rglob("*") if p.is_file())


def machine_of_run(record: RunRecord) -> str:
    """The name of the machine that a run was on, by its env.json. Raises UserError where that
    does not say."""
    env = record.env
    kind, count = str(env.get("device_kind", "")), env.get("device_count")
    refusal = UserError(f"{record.dir}/env.json: does not name the machine; add --on")
    if not isinstance(count, int) or count < 1:
        raise refusal
    platform = env.get("device_platform")
    if platform == "cpu":
        if count > 1:
            raise UserError(
                f"{record.dir}: ran on {count} devices that one host simulated, whose speed is "
                f"not predicted; measure a run on one"
            )
        return f"cpu:{env.get('cpu_cores') or 1}"
    if (name := gpu_name(kind)) is not None:
        return f"gpu:{name}x{count}"
    chip = chip_of(kind)
    for name in names_of(chip.name) if chip is not None else ():
        if parse_machine(name).num_devices == count:
            return name
    raise refusal


def predicted(run: Run, machine: Machine, quick: bool) -> tuple[Predicted, str]:
    """The prediction, by the machine's compiler if there is one and not `quick`, and the text of
    the program that it compiled for TPUs. Stored factors are left out."""
    size = checkpoint_bytes(run)
    saved = {"save_s": assumed_save_s(size), "checkpoint_bytes": size}
    if machine.where is not None and not quick and has_libtpu():
        compiled = compile_for(run, machine.where)
        if not compiled.hlo:
            raise UserError(
                f"{machine.name}: by the compiler this run does not fit there; name with --on the "
                "machine it ran on"
            )
        took = estimate(parse(compiled.hlo), machine.where)
        answer = Predicted(
            by="compiler",
            step_s=took.step_s,
            memory_by="compiler",
            memory_bytes=compiled.peak_bytes,
            compile_s=compiled.compile_s,
            by_part=took.parts,
            **saved,
        )
        return answer, compiled.hlo
    asked = machine.platform == "gpu" and not quick and has_cuda_compiler()
    machine = with_documents(run, machine)
    on_paper = Quick.of(run, machine, compile_for(run, machine) if asked else None)
    took = timing(on_paper.layouts, machine)
    answer = Predicted(
        by="quick",
        step_s=took.step_s,
        memory_by="compiler" if asked else "quick",
        memory_bytes=on_paper.peak_bytes,
        compile_s=on_paper.compiled.compile_s if on_paper.compiled else None,
        by_part={part: took.by_part[part] for part in ("attention", "mlp", "experts")},
        **saved,
    )
    return answer, ""


def as_trained(run: Run, record: RunRecord, machine: Machine) -> Run:
    """The run with what was chosen where it was trained; by records without that, with what the
    machine chooses."""
    name = record.plan.get("chosen", {}).get("train.remat")
    if run.train.remat in UNCHOSEN and name in REMATS:
        return replace(run, train=replace(run.train, remat=name))
    return settled(run, machine).run


def profiled(record: RunRecord, run: Run, program: str) -> dict[str, float] | None:
    """Seconds of a step by part of the model, of the run's profile; None where none was kept, or
    where its program can be compiled neither for the machine nor on it."""
    file = newest_profile(record.dir)
    if file is None:
        return None
    text = program or _compiled_here(record, run)
    if not text:
        return None
    from jax.profiler import ProfileData

    return by_part(seconds_by_instruction(ProfileData.from_file(str(file))), parse(text))


def _compiled_here(record: RunRecord, run: Run) -> str:
    """The text of the step as this host compiles it; empty where it is another machine."""
    import jax

    from lmwright.program.state import abstract_batch, abstract_state
    from lmwright.program.step import make_step

    devices, count = jax.devices(), record.env.get("device_count", 1)
    if devices[0].device_kind != record.env.get("device_kind") or len(devices) < count:
        return ""
    plan = resolve(run, devices[:count])
    with jax.set_mesh(plan.mesh):
        lowered = make_step(plan).lower(abstract_state(plan), abstract_batch(plan))
        return lowered.compile().as_text()


@dataclass(frozen=True)
class Comparison:
    """A run directory, the machine it was on, and both sides."""

    record: RunRecord
    machine: Machine
    measured: Measured
    predicted: Predicted
    by_part: dict[str, float] | None = None
    """Measured seconds by part of the model, if a profile was kept."""

    @classmethod
    def of(
        cls, folder: str, on: str | None, overrides: tuple[str, ...], quick: bool
    ) -> "Comparison":
        """The comparison of a run directory. Raises UserError where the folder is no run that was
        trained, or where the machine is unknown or cannot hold the run."""
        record = read_run(folder)
        real = measured(record)
        machine = parse_machine(on or machine_of_run(record))
        run = as_trained(completed(load_run(folder, overrides)), record, machine)
        planned, program = predicted(run, machine, quick)
        return cls(record, machine, real, planned, profiled(record, run, program))

    @property
    def factor(self) -> float:
        """Measured over predicted seconds of a step."""
        return self.measured.step_s / self.predicted.step_s

    def to_json(self) -> str:
        """The comparison for JSON, in seconds and bytes."""
        return json.dumps(
            {
                "run": str(self.record.dir),
                "machine": self.machine.name,
                "measured": asdict(self.measured),
                "predicted": asdict(self.predicted),
                "by_part_s": self.by_part,
                "factor": self.factor,
            },
            indent=1,
        )

    def lines(self) -> list[str]:
        """The comparison as a table: measured, predicted, and their ratio."""
        got, planned = self.measured, self.predicted
        by = "the TPU compiler" if planned.by == "compiler" else "the analytic model"
        if planned.memory_by != planned.by:
            by += ", its memory by the compiler for CUDA"
        rows = [
            _row("step", got.step_s, planned.step_s, short_duration),
            _row("input wait, of it", got.input_wait_s, None, short_duration),
            _row("compilation", got.compile_s, planned.compile_s, short_duration),
            _row("a save", got.save_s, planned.save_s, short_duration),
            _row("training waits for it", got.blocked_s, None, short_duration),
            _row("checkpoint", got.checkpoint_bytes, planned.checkpoint_bytes, disk),
            _row("memory", got.memory_bytes, planned.memory_bytes, memory_size),
        ]
        lines = [
            f"{self.record.name} on {self.machine.name}, predicted by {by}:",
            "",
            f"{'':<22} {'measured':>12} {'predicted':>12} {'ratio':>6}",
            *rows,
            "",
            f"the step is the median of {got.steps} logged values",
        ]
        if got.by_plan:
            lines.append("plan had compiled the step, so training only loaded it")
        if self.machine.platform == "cpu":
            lines.append("memory is that of the whole process, Python and libraries included")
        return lines + self._part_lines()

    def _part_lines(self) -> list[str]:
        if self.by_part is None:
            profile = newest_profile(self.record.dir)
            other = "its profile is of a machine that this host cannot compile for"
            return [other] if profile is not None else []
        whole = sum(self.by_part.values())
        what = "" if self.predicted.by == "compiler" else " (predicted: products alone)"
        lines = ["", f"by part, of the instructions in its profile{what}:"]
        for part, seconds in self.by_part.items():
            planned_s = self.predicted.by_part.get(part) or None
            lines.append(
                f"{_row(part, seconds, planned_s, short_duration):<56}{seconds / whole:6.0%}"
            )
        return lines


def _row(name: str, got: float | None, predicted: float | None, text) -> str:
    ratio = f"{got / predicted:6.2f}" if got and predicted else ""
    shown = ["-" if value is None else text(value) for value in (got, predicted)]
    return f"{name:<22} {shown[0]:>12} {shown[1]:>12} {ratio}".rstrip()
