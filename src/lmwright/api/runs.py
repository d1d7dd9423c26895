"""Runs: loading, preparing, planning, training, launching and comparing them."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmwright.api.arguments import (
    Count,
    Place,
    checked,
    checked_options,
    path_of,
    refuse_no_hooks,
    refuse_unknown,
)
from lmwright.config.run import Run
from lmwright.errors import UserError

if TYPE_CHECKING:
    from lmwright.data.prepare import Summary
    from lmwright.planner.answer import Answer
    from lmwright.report.read import RunRecord
    from lmwright.train.hooks import Hook
    from lmwright.train.loop import Outcome

AnyRun = Run | str | PathLike[str] | Mapping[str, Any]
"""A run, the path of a run file or of a run directory, or the tables of a run file."""


@checked
def load_run(source: AnyRun, *overrides: str) -> Run:
    """The run that a run file, a run directory, the tables of a run file or another run describe,
    with overrides such as `train.steps=200`. Prints what was chosen for it to stderr.

    Raises UserError naming file, line and field for anything that is not a valid run.
    """
    return _load(source, overrides)


def _load(source: Any, overrides: Sequence[str] = (), *left_out: str) -> Run:
    """The run of any of `AnyRun`, without the tables `left_out`."""
    from lmwright.formats.open import load_noted

    given = source if isinstance(source, Mapping | Run) else path_of(source)
    run, notes = load_noted(given, overrides, *left_out)
    for note in notes:
        print(note, file=sys.stderr)
    return run


@checked
def prepare(
    run: AnyRun, *, stages: Sequence[str] = (), keep: Literal["all", "store"] = "all"
) -> "Summary":
    """Turns the run's text into packed rows of tokens, all stages or those named; finished ones
    whose inputs have not changed are skipped. `keep="store"` drops stages as they are used up.

    Raises UserError for sources that cannot be read or do not fit the run.
    """
    from lmwright.data.prepare import prepare_command
    from lmwright.presets.sources import say_licenses

    run = _load(run, (), "sweep")  # whose runs are trained on the same data
    summary = prepare_command(run, tuple(stages), keep)
    say_licenses(run.data.sources)
    return summary


@checked
def plan(
    run: AnyRun,
    *,
    on: str | None = None,
    quick: bool = False,
    search: bool = False,
    longest: bool = False,
    finalists: Count | None = None,
    price: float | None = None,
    hours: float | None = None,
) -> "Answer":
    """Predicts memory, time and cost of a run on a machine such as `v5e-8`, `gpu:h100x8` or `any`,
    by default that of `plan.on`. `run` may also be the name of a preset or a model.

    The answer's `fits` says whether it fits, `figures` holds the numbers that `plan --json` prints,
    and printing it shows the report. `quick` is the estimate without a compiler, `search` looks for
    the best mesh, remat and batch, `longest` for the longest rows; `price` is in USD per chip-hour,
    `hours` the length of a session.

    Raises UserError for an unknown machine, or a run that the machine cannot hold in any way.
    """
    from lmwright.planner.answer import Wanted
    from lmwright.planner.command import answer_of, found_for

    wanted = Wanted(
        on=on, quick=quick, search=search, longest=longest, finalists=finalists, price=price,
        hours=hours,
    )  # fmt: skip
    source = _load(run) if isinstance(run, Run | Mapping) else path_of(run)
    return answer_of(*found_for(source, (), wanted))


@checked
def train(
    run: AnyRun,
    *,
    hooks: Sequence["Hook"] = (),
    rehearse: Literal["stop", "go"] | None = None,
    pod: bool = False,
) -> "Outcome":
    """Trains a run to its end, or on from where its directory stopped, and prepares its data first
    if that takes only minutes. `hooks` are called at the loop's moments; with `rehearse` come ten
    steps, a save, a resume, an export and a text first; with `pod`, every host of a TPU pod makes
    this call. Hours are counted from it.

    Returns the step reached, the exit code (0 when the run is done; docs/train.md lists the others)
    and the last held-out losses. An interrupt saves and returns; a second one stops at once. Raises
    UserError for data that is missing or a run that does not fit its directory.
    """
    from lmwright.train.command import train_and_tell
    from lmwright.train.prepared import prepare_first
    from lmwright.train.signals import StopRequest

    began = time.monotonic()
    refuse_no_hooks(hooks)
    with StopRequest() as stop:
        loaded = prepare_first(_load(run), lambda: _load(run), pod=pod)
        return train_and_tell(
            loaded, pod=pod, rehearse=rehearse, stop=stop, began=began, hooks=hooks
        )


@checked
def sweep(path: Place, *overrides: str, dry_run: bool = False) -> int:
    """Trains the runs of a run file's [sweep] and compares them in one report. Returns
    the exit code, 0 if all of them are done."""
    from lmwright.train.sweep import sweep_command

    return sweep_command(path_of(path), overrides, dry_run=dry_run)


@checked
def read_run(run_dir: Place) -> "RunRecord":
    """Curves of training (`train["loss"].steps`, `.values`) and of held-out losses by source
    (`evals`), samples, events, configuration and machine of a run, while it trains or afterwards.
    Raises UserError for a folder that is no run."""
    from lmwright.report.read import read_run

    return read_run(path_of(run_dir))


@checked
def report(*run_dirs: Place, out: Place | None = None, watch: bool = False) -> Path:
    """Writes the page of curves of one run or several, by default report.html in the run's
    directory, of several in the current folder; returns its path. With `watch` it is written
    anew until the runs are done or an interrupt."""
    from lmwright.report.html import report_command
    from lmwright.report.watch import watch_command

    page = None if out is None else path_of(out)
    write = watch_command if watch else report_command
    return write([path_of(folder) for folder in run_dirs], page)


@checked
def launch(
    path: str | PathLike[str],
    *overrides: str,
    on: str,
    rehearse: Literal["stop", "go"] | None = None,
    **options: Any,
) -> int:
    """Trains a run file elsewhere and brings it back after faults: on TPU slices (`v4-32`),
    `kaggle`, `ssh:hosts.txt`, `gke:CLUSTER` or processes here (`local:2x4`). `options` are those of
    `lmwright launch` with underscores, such as `zone="us-central2-b"`, `capacity="spot"`,
    `detach=True`, `dry_run=True`. Returns the exit code of the job, 0 if it was detached.

    Raises UserError for what would fail there and can be known here.
    """
    from lmwright.cloud.command import Wanted, launch_command, wanted_with
    from lmwright.cloud.target import Settings
    from lmwright.cloud.work import TRAIN, work_of

    if not isinstance(path, str | PathLike):  # a run may differ from what its directory holds
        kind = type(path).__name__
        raise UserError(f"{kind}: is not a file; give the path of a run file or of a run directory")
    kinds = {each.name: each.type for each in (*fields(Wanted), *fields(Settings))}
    refuse_unknown(options, kinds.keys() - {"settings", "given", "work"})
    options = checked_options(options, kinds)
    wanted = wanted_with(work_of(TRAIN, (), rehearse), on=on, **options)
    return launch_command(load_run(path, *overrides), path_of(path), overrides, wanted)
