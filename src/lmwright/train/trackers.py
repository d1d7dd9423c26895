"""Trackers: TensorBoard, Weights & Biases and trackio, fed beside metrics.jsonl.

    metrics.log(step, loss=...) --> metrics.jsonl        always, the source of truth
                                \\-> Tracker.log(step, {"train/loss": ...})  one for each name

A tracker is imported only when a run names it. A resumed run goes on in the same tracker
run: TensorBoard hides the points that are written again, the two others keep the first (trackio
both of the last step that it has, at which one of two may be missing).
"""

import json
import os
import re
import sys
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from lmwright.config.run import Run
from lmwright.data.json_text import parse_json
from lmwright.errors import UserError, first_line, install
from lmwright.guard.files import write_whole
from lmwright.guard.redact import redact_tree
from lmwright.guard.urls import redact_text

ID_FILE = "tracker.json"
WANDB_ENDS = {"WANDB_INIT_TIMEOUT": "90", "WANDB_FINISH_TIMEOUT": "90"}
"""Seconds for which wandb asks a server that does not answer; at its end it would ask for ever."""
SILENCE = re.compile(r"deadline exceeded|timed out|timeout", re.I)


class Tracker(Protocol):
    """Destination of metrics besides metrics.jsonl."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values of one step."""

    def flush(self) -> None:
        """Writes down what a kill of this process would lose."""

    def close(self) -> None:
        """Flushes and ends the tracker's run."""


class TensorBoard:
    """Event files under `run_dir/tensorboard`, written without TensorFlow."""

    def __init__(self, run_dir: Path, run: Run, resume_step: int | None):
        from tensorboardX import SummaryWriter

        # Points from the purge step on belong to the part that was lost; viewers drop them.
        purge_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(
            str(run_dir / "tensorboard"),
            purge_step=purge_step,
            max_queue=1000,  # a short queue makes the training loop wait for the disk
            # A file is named by the second: two starts within one would overwrite each other.
            filename_suffix=f".{os.getpid()}.{purge_step}",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run at Weights & Biases (extra `wandb`); its own variables choose mode and account."""

    def __init__(self, run_dir: Path, run: Run, resume_step: int | None):
        wandb = _import("wandb")
        for name, seconds in WANDB_ENDS.items():
            os.environ.setdefault(name, seconds)
        with _clean_arguments():
            self._run = wandb.init(
                project=run.metrics.project,
                name=run.name,
                id=_tracker_id(run_dir),
                resume="allow",
                dir=str(run_dir),
                config=_config(run),
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        pass  # its own process sends what it is given

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Run of trackio (extra `trackio`), stored on this machine unless its variables say
    otherwise."""

    def __init__(self, run_dir: Path, run: Run, resume_step: int | None):
        self._trackio = _import("trackio")
        found = self._trackio.init(
            project=run.metrics.project,
            name=f"{run.name}-{_tracker_id(run_dir)}",
            resume="allow",
            config=_config(run),
        )
        # Its own way to say which steps it has; it would keep those twice that are logged again.
        self._last = getattr(found, "_next_step", 0) - 1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._last:
            self._trackio.log(dict(values), step=step)

    def flush(self) -> None:
        pass  # its own process sends what it is given

    def close(self) -> None:
        self._trackio.finish()


KINDS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
EXTRAS = ("wandb", "trackio")
"""Those whose packages come with an extra of their name."""


def refuse_missing(run: Run) -> None:
    """Raises UserError for a tracker whose package cannot be imported, before a new run directory
    is made."""
    for name in run.metrics.trackers:
        if name in EXTRAS:
            _import(name)


def open_trackers(run_dir: Path, run: Run, resume_step: int | None) -> dict[str, Tracker]:
    """Opens every tracker of `run.metrics.trackers`. One that fails is left out with a warning
    where a run goes on, or where its server does not answer; else it is a UserError at the start of
    a run, and the opened ones are closed."""
    opened: dict[str, Tracker] = {}
    if resume_step is None:  # a run that starts over is another one there
        (run_dir / ID_FILE).unlink(missing_ok=True)
    for name in run.metrics.trackers:
        try:
            opened[name] = KINDS[name](run_dir, run, resume_step)
        except Exception as error:
            silent = isinstance(error, TimeoutError) or SILENCE.search(str(error))
            if resume_step is None and not silent:
                _close(opened)
                if isinstance(error, UserError):
                    raise
                raise _not_started(name, error) from error
            # its service may be away for a while, which a supervisor could not wait for
            warnings.warn(
                f"tracker {name} did not start and is not used in this session; metrics.jsonl has "
                f"everything: {first_line(error)}",
                stacklevel=3,
            )
    return opened


def _not_started(name: str, error: Exception) -> UserError:
    return UserError(
        f"metrics.trackers: {name} did not start: {first_line(error)}; set it up as its "
        "documentation says, or remove it from the list"
    )


def _close(trackers: Mapping[str, Tracker]) -> None:
    for tracker in trackers.values():
        tracker.close()


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise UserError(
            f"metrics.trackers: {name} is not installed; {install(name)}, or remove it from the "
            "list"
        ) from error
    except Exception as error:  # of any kind by a package that is set up wrongly
        raise _not_started(name, error) from error


def _tracker_id(run_dir: Path) -> str:
    """ID of the run at all trackers: stored in the run directory, new where there is none."""
    path = run_dir / ID_FILE
    if path.exists():
        with suppress(OSError, ValueError, TypeError, KeyError):  # a damaged one is made anew
            return str(parse_json(path)["id"])
    tracker_id = uuid.uuid4().hex[:8]
    write_whole(path, json.dumps({"id": tracker_id}))
    return tracker_id


@contextmanager
def _clean_arguments() -> Iterator[None]:
    """The command line without credentials of URLs, as long as it is entered: wandb keeps it."""
    before = sys.argv
    sys.argv = [redact_text(word) for word in before]
    try:
        yield
    finally:
        sys.argv = before


def _config(run: Run) -> dict[str, Any]:
    return redact_tree(asdict(run))
