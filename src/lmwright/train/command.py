"""Command `lmwright train` and its messages at the end of a session."""

import os
import time
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from lmwright.config.run import Run
from lmwright.core.cards import out_of_memory, refuse_lost_card
from lmwright.errors import TransientError, UserError
from lmwright.guard.heartbeat import beat
from lmwright.guard.processes import age_s
from lmwright.guard.terminal import visible
from lmwright.report.html import write_report
from lmwright.report.read import read_run
from lmwright.storage.mirror import place_in
from lmwright.train.chips import refuse_missing_chips
from lmwright.train.hooks import Hook
from lmwright.train.hosts import join
from lmwright.train.loop import Outcome
from lmwright.train.peers import expect_abort, leave
from lmwright.train.session import train
from lmwright.train.signals import EXIT_SESSION_OVER, EXIT_TIME_SPENT, StopRequest


def describe_stop(run: Run, outcome: Outcome) -> str:
    """Message about why a session stopped before the end of its run, and what to do."""
    why = {
        EXIT_SESSION_OVER: f"limits.session_hours = {run.limits.session_hours or 0:g} are over: ",
        EXIT_TIME_SPENT: f"limits.total_hours = {run.limits.total_hours or 0:g} are spent: ",
    }.get(outcome.exit_code, "")
    spent = outcome.exit_code == EXIT_TIME_SPENT
    cure = "Raise them to continue." if spent else "Run the same command again to continue."
    if outcome.step == 0:
        return f"{why}stopped before the first step; nothing is saved in {run.dir} yet. {cure}"
    return f"{why}stopped after step {outcome.step}; everything is saved in {run.dir}. {cure}"


def last_lines(run: Run, outcome: Outcome, report: str) -> list[str]:
    """Lines about the end of a session; `report` says where its report is."""
    if outcome.exit_code:
        return [describe_stop(run, outcome)]
    done = f"done: {outcome.step} steps in {run.dir}; {report}"
    return [*compare_lines(run, outcome), done]


def compare_lines(run: Run, outcome: Outcome) -> list[str]:
    """Held-out losses before the first step and now, by source, where both are known."""
    if run.eval.first != "start" or not outcome.losses:
        return []
    evals = read_run(run.dir).evals
    before = {
        source: curves["loss"].values[0]
        for source, curves in evals.items()
        if curves["loss"].steps[0] == 0
    }
    return [
        f"held-out loss of {loss.source}: {before[loss.source]:.4f} before, {loss.loss:.4f} now"
        for loss in outcome.losses
        if loss.source in before
    ]


def train_command(run: Run, **options: Any) -> int:
    """Trains and prints how it ended; `options` are those of `train_and_tell`. Returns the exit
    code."""
    return train_and_tell(run, **options).exit_code


def train_and_tell(
    run: Run,
    *,
    pod: bool = False,
    rehearse: str | None = None,
    stop: StopRequest | None = None,
    began: float | None = None,
    hooks: Sequence[Hook] = (),
) -> Outcome:
    """Trains, then prints where the results are and what to do next. With `pod`, or the variables
    of `train.hosts`, together with other processes; `stop` and `hooks` as in `train`. `rehearse`
    ("stop" or "go") comes first, and says what then. Time is counted from `began`, by default the
    start of this process."""
    console = Console(highlight=False)
    if began is None:
        began = time.monotonic() - age_s(os.getpid())
    beat("start")
    join(pod=pod)
    refuse_lost_card()
    refuse_missing_chips()
    beat("restore")
    try:
        if rehearse is not None:
            from lmwright.train.rehearsal import rehearse_command

            code = rehearse_command(run, rehearse, stop or StopRequest())
            if code is not None:
                return Outcome(0, code, [])
            beat("restore", step=0, saved=0)
        outcome = train(run, began=began, stop=stop, hooks=hooks)
    except Exception as caught:
        error = out_of_memory(caught) or caught
        if jax.process_count() > 1:
            if not isinstance(error, TransientError):  # which sounds like that of a lost process
                expect_abort(error)
            leave(error)
        if error is caught:
            raise
        raise error from caught
    if jax.process_index() == 0:
        try:
            report = f"curves in {write_report([run.dir], place_in(run.dir, 'report.html'))}"
        except UserError as error:  # the run itself ended as its exit code says
            report = f"no report: {error}"
        for line in last_lines(run, outcome, report):
            console.print(visible(line), markup=False, soft_wrap=True)
    return outcome
