"""A run directory as the report sees it: run.toml, plan.json, env.json, sessions.json,
metrics.jsonl, evals.jsonl.

Only files are read, never jax or the training code, so that a report of a run can be made
on any machine, also while the run is going on.
"""

import json
import math
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from lmwright.errors import UserError
from lmwright.guard.redact import redact_tree
from lmwright.report.goodput import read_sessions
from lmwright.report.measured import Line, read_measured
from lmwright.storage.mirror import fetched, shown

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass
class Series:
    """One curve: a value for each step at which it was logged; values may be nan or inf."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Appends a point; a step that is measured again (a finished run started once more)
        replaces the old one."""
        if self.steps and step < self.steps[-1]:
            raise ValueError(f"step {step} comes after step {self.steps[-1]}")
        if self.steps and step == self.steps[-1]:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)


@dataclass(frozen=True)
class Sample:
    """A text generated during the run."""

    step: int
    prompt: str
    text: str


@dataclass
class RunRecord:
    """Content of the files of one run directory."""

    dir: Path
    name: str
    config: dict[str, Any]
    """Settings of run.toml with dotted keys."""
    plan: dict[str, Any]
    """Content of plan.json; empty if there is none."""
    env: dict[str, Any]
    """Content of env.json; empty if there is none."""
    train: dict[str, Series] = field(default_factory=dict)
    """Curves of training by metric."""
    evals: dict[str, dict[str, Series]] = field(default_factory=dict)
    """Curves of evaluations by source and metric."""
    samples: list[Sample] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """Lines of any other kind, as they are."""
    sessions: list[dict[str, Any]] = field(default_factory=list)
    """Sessions of sessions.json."""
    measured: list[Line] = field(default_factory=list)
    """Lines of evals.jsonl, oldest first."""
    hours: Series = field(default_factory=Series)
    """Hours of running at each logged step; time between a stop and its resume is left out."""

    @property
    def resumes(self) -> list[int]:
        """Steps at which the run was resumed."""
        return [event["step"] for event in self.events if event["kind"] == "resume"]

    @property
    def tasks(self) -> dict[str, dict[str, Series]]:
        """Curves of benchmarks by task and metric."""
        curves: dict[str, dict[str, Series]] = {}
        lines = [line for line in self.measured if line["kind"] == "task"]
        for line in sorted(lines, key=itemgetter("step")):
            parts = [line.get("adapter"), line["source"], f"{line['shots']} shots"]
            name = ", ".join(part for part in [*parts, "chat" * line["chat"]] if part)
            for metric, value in line["scores"].items():
                series = curves.setdefault(name, {}).setdefault(metric, Series())
                series.add(line["step"], value)
        return curves


def read_run(run_dir: str | Path) -> RunRecord:
    """Reads a run directory. Raises UserError naming the file and line that is missing or
    damaged."""
    run_dir = fetched(run_dir)
    if run_dir.is_file():
        there = _read_toml(run_dir).get("dir") if run_dir.suffix == ".toml" else None
        if there:
            raise UserError(
                f"{run_dir}: is a run file; give the directory ({there}) in which it trained"
            )
        raise UserError(f"{shown(run_dir)}: is a file; give the directory of a run")
    if not run_dir.is_dir():
        raise UserError(f"{shown(run_dir)}: no such folder; give the directory of a run")
    config = _read_toml(run_dir / "run.toml")
    record = RunRecord(
        dir=run_dir,
        name=str(config.get("name", run_dir.name)),
        config=flatten(redact_tree(config)),
        plan=_read_json(run_dir / "plan.json"),
        env=_read_json(run_dir / "env.json"),
        measured=read_measured(run_dir),
    )
    with suppress(OSError):
        record.sessions = read_sessions(run_dir)
    _read_metrics(run_dir / "metrics.jsonl", record)
    return record


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables to dotted keys; tables in a list are numbered: `data.sources.0.path`."""
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        items = list(enumerate(tree))
    else:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{shown(path)}: missing; {shown(path.parent)} is not a run directory "
            "(`lmwright train` makes one)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {error}; restore it from a copy") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read: {error}; restore it from a copy, or remove it to make the "
            "report without it"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; remove it to make the report without it")
    return value


def _read_metrics(path: Path, record: RunRecord) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: missing; train the run first, nothing was measured yet") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")
    tail = lines.pop()  # what a running or killed run was writing; not yet a line
    clock = _Clock(record.hours)
    for number, line in enumerate(lines, 1):
        try:
            clock.add(add_line(line, record))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number}: {error}; restore the file from a copy, or remove that line"
            ) from error
    if not record.train and not record.evals:
        torn = " but a torn line" if tail else ""
        raise UserError(
            f"{path}: holds no measurement{torn}; train the run, or restore the file from a copy"
        )


def add_line(line: bytes, record: RunRecord) -> dict[str, Any]:
    """Adds a line of metrics.jsonl to a record; returns its entry. Raises ValueError with the
    reason where the line is damaged."""
    entry = _parse(line)
    try:
        _add(entry, record)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"not a {entry['kind']!r} line ({what})") from error
    return entry


def _parse(line: bytes) -> dict[str, Any]:
    problem = "no JSON object with step, time and kind"
    try:
        entry = json.loads(line)
        if isinstance(entry, dict) and isinstance(entry.get("kind"), str):
            entry["step"] = int(entry["step"])
            entry["time"] = float(entry["time"])
            datetime.fromtimestamp(entry["time"], UTC)  # a date
            return entry
    except KeyError:
        pass
    except (ValueError, TypeError, OverflowError, RecursionError, OSError) as error:
        problem = str(error)
    raise ValueError(f"damaged ({problem})")


def _add(entry: dict[str, Any], record: RunRecord) -> None:
    step, kind = entry["step"], entry["kind"]
    fields = {k: v for k, v in entry.items() if k not in ("step", "time", "kind")}
    if kind == "train":
        _extend(record.train, step, fields)
    elif kind == "eval":
        source = str(fields.pop("source"))
        fields["loss"]  # required
        if ("rows" in fields) != ("of_rows" in fields):
            raise ValueError("rows and of_rows belong together")
        _extend(record.evals.setdefault(source, {}), step, fields)
    elif kind == "sample":
        record.samples.append(Sample(step, str(fields["prompt"]), str(fields["text"])))
    else:
        if kind == "checkpoint" and "blocked_s" in fields:
            entry["blocked_s"] = _number(fields["blocked_s"])
        if kind == "gradient error" and "error" in fields:
            numbers = [name for name in fields if name.split()[-1] == "error"]
            entry |= {name: _number(fields[name]) for name in numbers} | {
                "setting": fields["setting"]
            }
        record.events.append(entry)


def _extend(curves: dict[str, Series], step: int, fields: dict[str, Any]) -> None:
    values = {name: _number(value) for name, value in fields.items()}  # all, or none is added
    for name, value in values.items():
        curves.setdefault(name, Series()).add(step, value)


def _number(value: Any) -> float:
    if isinstance(value, str):
        if value not in NON_FINITE:
            raise ValueError(f"{value!r} is not a number")
        return NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


class _Clock:
    """Hours of running time: a resume continues the clock from the last line before it."""

    def __init__(self, hours: Series):
        self._hours = hours
        self._spent_s = 0.0
        self._last: float | None = None

    def add(self, entry: dict[str, Any]) -> None:
        now = entry["time"]
        if self._last is not None and entry["kind"] != "resume":
            self._spent_s += max(now - self._last, 0.0)
        self._last = now
        if not self._hours.steps or entry["step"] > self._hours.steps[-1]:
            self._hours.add(entry["step"], self._spent_s / 3600)
        else:
            # Evaluations and checkpoints of a step lengthen its time.
            self._hours.values[-1] = self._spent_s / 3600
