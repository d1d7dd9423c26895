"""Profile: where the time of a run's step went, where a profile was kept.

    RUN/profile/**/*.xplane.pb --jax.profiler--> seconds of each instruction of the train step
                                             --> shares of kinds of work, the longest operations

A run with `metrics.profile_steps` makes one. An instruction's seconds are its own, without those
that ran inside of it; on a CPU some run beside each other, so that shares say more than seconds.
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmwright.report.read import RunRecord

MODULE = "jit_train_step"
DEVICE_LINE, MODULES_LINE = "XLA Ops", "XLA Modules"  # of a TPU's or GPU's plane


def newest_profile(run_dir: Path) -> Path | None:
    """The file of the last profile of a run; None where none was kept."""
    profiles = list((run_dir / "profile").rglob("*.xplane.pb"))
    return max(profiles, key=lambda path: path.stat().st_mtime) if profiles else None


def seconds_by_instruction(data: Any, categories: dict[str, str] | None = None) -> Counter:
    """Seconds of one step by the name of the instruction, of a `jax.profiler.ProfileData`; those
    of the first device where there are several. `categories` gets what the profiler calls each."""
    total, runs = Counter(), set()
    categories = {} if categories is None else categories
    for plane in data.planes:
        if plane.name.startswith("/device:") and not plane.name.endswith(":0"):
            continue
        on_device = plane.name.startswith("/device:")
        for line in plane.lines:
            if line.name == "python":  # millions of calls, none of an instruction
                continue
            if on_device and line.name == MODULES_LINE:
                runs |= {e.start_ns for e in line.events if e.name.startswith(MODULE)}
            named = _instructions(line, on_device and line.name == DEVICE_LINE, runs, categories)
            total.update(_own_seconds(named))
    return Counter({name: seconds / max(1, len(runs)) for name, seconds in total.items()})


def _instructions(
    line: Any, of_device: bool, runs: set, categories: dict[str, str]
) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of the step's instructions on a line, in nanoseconds."""
    for event in line.events:
        stats = dict(event.stats)
        module, name = stats.get("hlo_module"), stats.get("hlo_op")
        if name is None and of_device:  # a TPU names it by its text, and the module elsewhere
            name, module = event.name.split(" ", 1)[0], stats.get("hlo_module", MODULE)
        if name is not None and str(module).startswith(MODULE):
            if "run_id" in stats and not of_device:
                runs.add(stats["run_id"])
            name = str(name).lstrip("%")
            if "hlo_category" in stats:
                categories[name] = str(stats["hlo_category"])
            yield name, event.start_ns, event.start_ns + event.duration_ns


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


MOST_OPERATIONS = 15
KINDS = {
    "collectives": r"all-(reduce|gather|to-all)|reduce-scatter|collective|ragged-all|\bnccl",
    "matrix products": r"convolution|\bdot|gemm|matmul|cublas|ynn|onednn",
    "attention and other kernels": r"custom-call|pallas|mosaic|tpu_custom",
    "copies": r"copy|transpose|bitcast|slice|concatenate|data formatting|host",
}
"""Kinds of instructions by their name and what the profiler calls them; the first match counts."""
OTHER_KIND = "vector units and what is fused with them"


@dataclass(frozen=True)
class Profile:
    """The newest profile of a run, a mean step."""

    kinds: dict[str, float]
    """Fraction of the instructions' time by kind, the largest first."""
    operations: list[tuple[str, str, float, float]]
    """(name, kind, seconds, share) of the longest operations."""
    input_wait_share: float | None
    """Fraction of a step's time that waits for input, as the run measured it."""


def kind_of(name: str, category: str = "") -> str:
    """Kind of work of an instruction."""
    text = f"{category} {name}".lower()
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, text))
    return next(found, OTHER_KIND)


def profile_of(record: RunRecord) -> Profile | None:
    """The newest profile of a run; None where the run kept none, or jax cannot read it."""
    file = newest_profile(record.dir)
    if file is None:
        return None
    from jax.profiler import ProfileData

    categories: dict[str, str] = {}
    try:
        seconds = seconds_by_instruction(ProfileData.from_file(str(file)), categories)
    except (RuntimeError, ValueError):  # of a file that was cut off
        return None
    whole = sum(seconds.values())
    if whole <= 0:
        return None
    kinds: Counter = Counter()
    for name, value in seconds.items():
        kinds[kind_of(name, categories.get(name, ""))] += value / whole
    longest = [
        (name, kind_of(name, categories.get(name, "")), value, value / whole)
        for name, value in seconds.most_common(MOST_OPERATIONS)
    ]
    waits = record.train.get("input_wait_share")
    wait = statistics.median(waits.values) if waits and waits.values else None
    return Profile(dict(kinds.most_common()), longest, wait)


def profile_rows(profile: Profile) -> dict[str, str]:
    """Rows for the report: shares, then the longest operations."""
    rows = {f"time in {kind}": f"{share:.1%}" for kind, share in profile.kinds.items()}
    rows.setdefault("time in collectives", "0.0%")
    if profile.input_wait_share is not None:
        rows["waiting for input, of a step"] = f"{profile.input_wait_share:.1%}"
    for name, kind, seconds, share in profile.operations:
        rows[name] = f"{seconds * 1e3:.3g} ms a step, {share:.1%}, {kind}"
    return rows
