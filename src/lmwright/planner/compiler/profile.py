"""Profile: where the time of a run's step went, by part of the model, where a profile was kept.

    RUN/profile/**/*.xplane.pb --jax.profiler--> seconds of each instruction of the train step
    the compiled step's text   --parts---------> part of each instruction

A run with `metrics.profile_steps` makes one. An instruction's seconds are its
own, without those that ran inside of it; on a CPU some run beside each other, so that shares say
more than seconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lmwright.planner.compiler.hlo import Program
from lmwright.planner.compiler.parts import OTHER, part_of, read_frames

MODULE = "jit_train_step"
DEVICE_LINE, MODULES_LINE = "XLA Ops", "XLA Modules"  # of a TPU's or GPU's plane


def newest_profile(run_dir: Path) -> Path | None:
    """The file of the last profile of a run; None where none was kept."""
    profiles = list((run_dir / "profile").rglob("*.xplane.pb"))
    return max(profiles, key=lambda path: path.stat().st_mtime) if profiles else None


def seconds_by_instruction(data: Any) -> Counter:
    """Seconds of one step by the name of the instruction, of a `jax.profiler.ProfileData`; those
    of the first device where there are several."""
    total, runs = Counter(), set()
    for plane in data.planes:
        if plane.name.startswith("/device:") and not plane.name.endswith(":0"):
            continue
        on_device = plane.name.startswith("/device:")
        for line in plane.lines:
            if line.name == "python":  # millions of calls, none of an instruction
                continue
            if on_device and line.name == MODULES_LINE:
                runs |= {e.start_ns for e in line.events if e.name.startswith(MODULE)}
            named = _instructions(line, on_device and line.name == DEVICE_LINE, runs)
            total.update(_own_seconds(named))
    return Counter({name: seconds / max(1, len(runs)) for name, seconds in total.items()})


def _instructions(line: Any, of_device: bool, runs: set) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of the step's instructions on a line, in nanoseconds."""
    for event in line.events:
        stats = dict(event.stats)
        module, name = stats.get("hlo_module"), stats.get("hlo_op")
        if name is None and of_device:  # a TPU names it by its text, and the module elsewhere
            name, module = event.name.split(" ", 1)[0], stats.get("hlo_module", MODULE)
        if name is not None and str(module).startswith(MODULE):
            if "run_id" in stats and not of_device:
                runs.add(stats["run_id"])
            yield str(name).lstrip("%"), event.start_ns, event.start_ns + event.duration_ns


def _own_seconds(events: Iterable[tuple[str, float, float]]) -> Counter:
    """Seconds by name, less what is inside of an event on the same line."""
    own, open_events = Counter(), []
    for name, start, end in sorted(events, key=lambda e: (e[1], -e[2])):
        while open_events and open_events[-1][1] <= start:
            open_events.pop()
        if open_events:
            own[open_events[-1][0]] -= (min(end, open_events[-1][1]) - start) / 1e9
        own[name] += (end - start) / 1e9
        open_events.append((name, end))
    return own


def by_part(seconds: Counter, program: Program) -> dict[str, float]:
    """Seconds of each part of the model, the largest first."""
    frames = read_frames(program.text)
    parts = {
        step.name: part_of(step, frames)
        for computation in program.computations.values()
        for step in computation.instructions
    }
    sums = Counter()
    for name, value in seconds.items():
        sums[parts.get(name, OTHER)] += value
    return {part: value for part, value in sums.most_common() if value > 0}
