"""metrics.jsonl: everything a run measured, one JSON object per line; the source of truth.

    kind        fields beside step and time
    train       loss, grad_norm, learning_rate, tokens_per_s, ... (see throughput.py)
    eval        source, loss, ppl, bits_per_byte, tokens, rows, of_rows
    sample      prompt, text
    any other   an event ("resume", "checkpoint", ...) with its own fields

A line is written whole and handed to the system at once, so that SIGKILL costs at most the
line being written. A resumed run drops what the steps after its checkpoint had logged and
writes those steps again: one line a step, and the curve of a run that was never stopped. A run
that is done evaluates its last state again when it is started again; equal lines are not repeated.
A file that is gone or damaged does not keep a run from resuming: the lines that a report can
read stay, the others are moved to metrics.jsonl.damaged, and one sentence says so.
Numbers JSON cannot hold are the strings "NaN", "Infinity" and "-Infinity".
"""

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from lmwright.config.run import Run
from lmwright.data.json_text import json_value
from lmwright.errors import StorageError
from lmwright.guard.files import NO_SPACE, write_whole
from lmwright.report.read import RunRecord, add_line
from lmwright.train.trackers import Tracker, open_trackers

METRICS_FILE = "metrics.jsonl"
DAMAGED_FILE = "metrics.jsonl.damaged"
RESERVED = ("step", "time", "kind")
EVALUATED = ("eval", "sample")


class MetricsWriter:
    """Appends to `run_dir/metrics.jsonl` and to the run's trackers; a context manager.

    `resume_step` is the step of the checkpoint that training goes on from; None starts over
    and drops lines of an earlier start. On a process other than 0 every method does nothing
    (`process_index`, of jax if unset). `warn` takes a sentence about what is missing of a file
    that is gone or damaged. Raises UserError for an unwritable file.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        run: Run,
        resume_step: int | None,
        *,
        process_index: int | None = None,
        warn: Callable[[str], None] = print,
    ):
        if process_index is None:
            import jax

            process_index = jax.process_index()
        self.path = Path(run_dir) / METRICS_FILE
        self._active = process_index == 0
        self._file = None
        self._held = b""
        """What the disk has not taken yet."""
        self._trackers: dict[str, Tracker] = {}
        self._evaluated: list[dict[str, Any]] = []
        self._ended: set[str] = set()
        if not self._active:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if note := truncate_after(self.path, resume_step, run.metrics.log_every_steps):
                warn(note)
            self._evaluated, self._ended = _evaluated_at(self.path, resume_step)
            # Opened before the trackers: a wrong folder must not leave a run at wandb.
            self._file = open(self.path, "ab", buffering=0)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            self._trackers = open_trackers(Path(run_dir), run, resume_step)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def log(self, step: int, **values: float) -> None:
        """Logs training values of one step: plain numbers, units in the names."""
        self._write(step, "train", {name: float(value) for name, value in values.items()})
        self._track(step, {f"train/{name}": float(value) for name, value in values.items()})

    def log_eval(
        self,
        step: int,
        source: str,
        loss: float,
        ppl: float | None,
        bits_per_byte: float | None,
        tokens: int,
        rows: int = 0,
        of_rows: int = 0,
        scores: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Logs a held-out result: loss in nats per token over `tokens` tokens of one source, in
        `rows` of its `of_rows` rows, and further scores by name.

        `ppl` and `bits_per_byte` are None where they have no meaning or are not known.
        """
        known = {"loss": loss, "ppl": ppl, "bits_per_byte": bits_per_byte, **scores}
        scores = {name: float(value) for name, value in known.items() if value is not None}
        counts = {"tokens": int(tokens)}
        if of_rows:
            counts |= {"rows": int(rows), "of_rows": int(of_rows)}
        self._write(step, "eval", {"source": source, **scores, **counts})
        self._track(step, {f"eval/{source}/{name}": value for name, value in scores.items()})

    def log_samples(self, step: int, samples: Iterable[Mapping[str, str]]) -> None:
        """Logs generated texts, each a mapping with `prompt` and `text`."""
        for sample in samples:
            self._write(step, "sample", {"prompt": sample["prompt"], "text": sample["text"]})

    def event(self, kind: str, *, step: int, **fields: Any) -> None:
        """Logs an event, for example `event("checkpoint", step=k, seconds=s)`.

        The file is forced to disk, so that lines up to a saved checkpoint outlive a power cut, and
        trackers are flushed: the lines will not come again.
        """
        if kind in ("train", "eval", "sample"):
            raise ValueError(f"{kind!r} is not an event; use log, log_eval or log_samples")
        self._write(step, kind, fields)
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise _unwritable(self.path, error) from error
        self._tell(step, lambda tracker: tracker.flush())

    def close(self) -> None:
        """Closes the file and the trackers; may be called twice."""
        if self._file is not None:
            with suppress(StorageError):  # of a device that is gone
                self._write_held()
            if left := self._held.count(b"\n"):
                warnings.warn(f"{self.path}: full to the end, lines lost: {left}", stacklevel=2)
            self._file.close()
            self._file = None
        trackers, self._trackers = self._trackers, {}
        for name, tracker in trackers.items():
            try:
                tracker.close()
            except Exception as error:  # the run is done; its record is in metrics.jsonl
                warnings.warn(f"tracker {name} did not close: {error}", stacklevel=2)

    def _write(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        if not self._active:
            return
        if self._file is None:
            raise ValueError("MetricsWriter is closed")
        if taken := [name for name in RESERVED if name in fields]:
            raise ValueError(f"{taken[0]!r} is set by the writer itself")
        line = {"step": int(step), "time": round(time.time(), 3), "kind": kind}
        line |= {name: json_value(value) for name, value in fields.items()}
        if kind in EVALUATED and self._is_there(line):
            return
        waited = bool(self._held)
        self._held += json.dumps(line, allow_nan=False).encode() + b"\n"
        self._write_held()
        if self._held and not waited:
            said = f"{self.path}: the disk is full; its lines wait in memory until there is space"
            warnings.warn(said, stacklevel=3)

    def _write_held(self) -> None:
        """Writes what is held back. On a full disk it stays so: the next save tells whether the
        run can go on, and lines are no reason to lose steps."""
        assert self._file is not None
        try:
            self._held = self._held[self._file.write(self._held) :]
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise _unwritable(self.path, error) from error

    def _is_there(self, line: Mapping[str, Any]) -> bool:
        """True for a line of the evaluation with which a session before ended, and for one of what
        was evaluated before and not then: an adapter that had ended."""
        if _untimed(line) in self._evaluated:
            return True
        then = self._evaluated and self._evaluated[0]["step"] == line["step"]
        return bool(then) and _evaluates(line) in self._ended

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        self._tell(step, lambda tracker: tracker.log(int(step), values))

    def _tell(self, step: int, what: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                what(tracker)
            except Exception as error:  # a lost connection must not end a training run
                warnings.warn(
                    f"tracker {name} failed at step {step} and is no longer used; {METRICS_FILE} "
                    f"has everything: {error}",
                    stacklevel=4,
                )
                del self._trackers[name]


def truncate_after(path: Path, resume_step: int | None, log_every_steps: int = 1) -> str | None:
    """Keeps the lines of steps up to `resume_step` (None: no line), atomically.

    A torn last line, left by SIGKILL or a power cut, is dropped; lines that a report could not
    read are moved to `metrics.jsonl.damaged`. Returns a sentence about such lines, and about
    steps of which measurements should be there and are not; None where all is well.
    """
    exists = path.exists()
    data = path.read_bytes() if exists else b""
    lines = data.split(b"\n")
    tail = lines.pop()  # empty when the file ends in a newline
    if resume_step is None:
        if data:
            write_whole(path, b"")
        return None
    # Only its newline is missing: the line is whole, and its step will not come again.
    if _step_or_none(tail) is not None:
        lines.append(tail)
    good, damaged, last = _sorted_out(lines, path, resume_step)
    if damaged:
        with open(path.with_name(DAMAGED_FILE), "ab") as file:
            file.write(b"".join(lines[number - 1] + b"\n" for number in damaged))
    repaired = b"".join(line + b"\n" for line in good)
    if repaired != data:
        write_whole(path, repaired)
    note = _damage(damaged)
    # the last line that was due stands in the file before its step is saved
    if last // log_every_steps < resume_step // log_every_steps:
        lost = f"after step {last}" if good else f"up to step {resume_step}"
        content = "holds no whole line" if data else "is empty" if exists else "is missing"
        content = f"ends at step {last}" if good else content
        note += ", and " if note else f"{content}, so "
        note += f"the measurements {lost} are lost"
    return f"{path}: {note}; training continues from step {resume_step}" if note else None


def _evaluated_at(path: Path, step: int | None) -> tuple[list[dict[str, Any]], set[str]]:
    """The lines of an evaluation after a step, without their times, and what was evaluated before
    that step and not after it."""
    if step is None or not path.exists():
        return [], set()
    marks = [f'"kind": "{kind}"'.encode() for kind in EVALUATED]
    data = path.read_bytes().split(b"\n")
    lines = [json.loads(line) for line in data if any(mark in line for mark in marks)]
    lines = [line for line in lines if line["kind"] in EVALUATED]
    then = [_untimed(line) for line in lines if line["step"] == step]
    return then, {*map(_evaluates, lines)} - {*map(_evaluates, then)}


def _evaluates(line: Mapping[str, Any]) -> str:
    """Name of the source, or the prompt, of a line of an evaluation."""
    return str(line["source"] if line["kind"] == "eval" else line["prompt"])


def _untimed(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "time"}


def _sorted_out(
    lines: list[bytes], path: Path, resume_step: int
) -> tuple[list[bytes], list[int], int]:
    """The lines of steps up to `resume_step` that a report can read, the numbers of the damaged
    ones, and the last step that was kept (0 if none)."""
    good, damaged, last = [], [], 0
    record = RunRecord(dir=path.parent, name="", config={}, plan={}, env={})
    for number, line in enumerate(lines, 1):
        step = _step_or_none(line)
        if step is not None and step > resume_step:
            continue
        try:
            if step is None:
                raise ValueError("no JSON object with an integer step")
            add_line(line, record)
        except ValueError:
            damaged.append(number)
        else:
            good.append(line)
            last = max(last, step)
    return good, damaged, last


def _damage(damaged: list[int]) -> str:
    """Sentence about the damaged lines of these numbers; empty if there are none."""
    if not damaged:
        return ""
    if len(damaged) == 1:
        return f"line {damaged[0]} is damaged and is now in {DAMAGED_FILE}"
    more = len(damaged) - 1
    return f"line {damaged[0]} and {more} more are damaged and are now in {DAMAGED_FILE}"


def _step_or_none(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: cannot be written: {error.strerror or error}; free some space, make the folder "
        "writable, or set `dir` to another one"
    )
