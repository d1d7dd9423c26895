"""Rehearsal: the first steps of a run on its own machine, in a folder of their own.

    DIR.rehearsal: steps 1 to 5, save, 6 to 10     the bits of the state are noted, and it is left
                   restore,         6 to 10, save  they must be the same
                   export, generate                --> checklist

The sessions are those of `train.session`. Nothing is written to the run directory, and the folder
is removed at the end, whatever it was.
"""

import gc
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from lmwright.checkpoint.files import root_of
from lmwright.config.run import Checkpoint, Limits, Metrics, Run
from lmwright.core.cards import is_full
from lmwright.core.processes import from_first, meet
from lmwright.errors import UserError, first_line
from lmwright.guard.heartbeat import beating
from lmwright.guard.temporary import temporary_folder
from lmwright.hardware.chips import GIB
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.checklist import FITS, RESUMES, Check, checklist
from lmwright.program.length import completed
from lmwright.program.trainee import training_of
from lmwright.report.read import read_run
from lmwright.storage.bucket import Bucket, is_bucket
from lmwright.storage.mirror import mirror_folder
from lmwright.train.corruption import replica_sums
from lmwright.train.hooks import Hook, Running
from lmwright.train.rehearsal_checks import device_checks, file_checks
from lmwright.train.session import train
from lmwright.train.signals import StopRequest

STEPS = 10
ROWS = 64  # held out, of each source
ENOUGH = -1  # exit code of a session that has done them
MEMORY_SHARE = 0.95  # of what a device of the planned kind has, that is as good


class Left(Exception):
    """A session was left without its last save."""


@dataclass
class Take(Hook):
    """Notes the bits of the state after a step, and ends the session there: by leaving it, or as a
    signal does."""

    step: int
    leaves: bool
    sums: np.ndarray | None = None

    def after_evaluate(self, session: Running, step: int) -> None:
        if step != self.step:
            return
        self.sums = np.asarray(replica_sums(session.plan.mesh, session.state)(session.state))
        if self.leaves:
            raise Left
        session.stop.exit_code = session.stop.exit_code or ENOUGH


def rehearse(
    run: Run, devices: Sequence[jax.Device] | None = None, *, stop: StopRequest
) -> tuple[list[Check], int | None]:
    """The checklist of a rehearsal; with the exit code where it was asked to stop before its end.
    Raises UserError on a machine smaller than `plan.on`, or for what training refuses."""
    devices = list(devices or jax.devices())
    refuse_smaller(run, devices)
    run = rehearsed(completed(run))
    with _folder(run.dir):
        steps = run.eval.every_steps
        first = Take(steps, leaves=True)
        try:
            outcome = train(run, devices, stop=stop, hooks=[first])
            return [], outcome.exit_code  # asked to stop
        except Left:
            pass
        except jax.errors.JaxRuntimeError as error:
            if not is_full(error):
                raise
            return [Check(FITS, False, first_line(error))], None
        gc.collect()  # the state of the first session
        checks = _on_first_process(lambda: device_checks(run, devices, read_run(run.dir)))
        again = Take(steps, leaves=False)
        outcome = train(run, devices, stop=stop, hooks=[again])
        if outcome.exit_code not in (0, ENOUGH):
            return [], outcome.exit_code
        stop.exit_code, stop.starting = None, True
        gc.collect()
        checks.append(resume_check(first, again, run.checkpoint.save_every_steps))
        with beating("eval"), temporary_folder() as out:
            checks += _on_first_process(lambda: file_checks(run, Path(out)))
            meet("rehearsal files")
    return checks, None


def rehearsed(run: Run) -> Run:
    """The run that is rehearsed: the same model, data, mesh and step, in another folder."""
    steps = min(STEPS, max(trainee.steps for trainee in training_of(run).trainees))
    if steps < 2:
        raise UserError("--rehearse: the run has one step, and a rehearsal takes two; train it")
    return replace(
        run,
        dir=f"{run.dir.rstrip('/')}.rehearsal",
        train=replace(run.train, publish_every_steps=None),
        eval=replace(
            run.eval,
            every_steps=steps,
            first="start",
            max_rows=min(run.eval.max_rows or ROWS, ROWS),
            prompts=(),
        ),
        checkpoint=Checkpoint(save_every_steps=steps // 2),
        metrics=Metrics(log_every_steps=1, trackers=()),
        limits=Limits(),
        publish=None,
    )


def refuse_smaller(run: Run, devices: Sequence[jax.Device]) -> None:
    """UserError on fewer devices than those of `plan.on`, of another kind or with less memory."""
    if run.plan.on is None:
        return
    machine = parse_machine(run.plan.on)
    here = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    cure = "rehearse on that one, or set plan.on to the machine that is used"
    if devices[0].platform != machine.platform or len(devices) < machine.num_devices:
        raise UserError(
            f"--rehearse: the run is planned for {machine.name}, {machine.num_devices} devices, "
            f"and this machine has {here}; {cure}"
        )
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    if memory and machine.usable_bytes and memory < MEMORY_SHARE * machine.usable_bytes:
        raise UserError(
            f"--rehearse: a device of {machine.name} has {machine.usable_bytes / GIB:.1f} GiB, and "
            f"one of {here} {memory / GIB:.1f} GiB; {cure}"
        )


def resume_check(first: Take, again: Take, saved: int) -> Check:
    """The check that the steps after a restore give the same bits."""
    what = f"steps {saved + 1} to {first.step} after a restore"
    if first.sums is None or again.sums is None:
        return Check(RESUMES, None, "no state was compared")
    unlike = int((first.sums != again.sums).any(axis=0).sum())
    count = first.sums.shape[1]
    if unlike:
        return Check(RESUMES, False, f"{what}: other bits in {unlike} of {count} arrays")
    return Check(RESUMES, True, f"{what}: {count} arrays of the state are equal bit for bit")


def passes(checks: Sequence[Check]) -> bool:
    """True if nothing was found that does not hold."""
    return all(check.holds is not False for check in checks)


def rehearse_command(run: Run, what_then: str, stop: StopRequest) -> int | None:
    """Rehearses and prints the checklist; None if training is to go on, else an exit code. Raises
    UserError where something does not hold."""
    if what_then == "go" and root_of(mirror_folder(run.dir)).steps():
        if jax.process_index() == 0:
            print(f"{run.dir} has checkpoints, so the run continues without a rehearsal")
        return None
    checks, code = rehearse(run, stop=stop)
    if code is not None:
        return code
    if jax.process_index() == 0:
        print("\n".join(checklist(checks)))
    if not from_first(passes(checks)):
        raise UserError("--rehearse: not all of the checklist holds; nothing was trained")
    return None if what_then == "go" else 0


@contextmanager
def _folder(path: str) -> Iterator[None]:
    """The folder of a rehearsal, empty at first and gone at last."""
    _remove(path)
    meet("rehearsal begin")
    try:
        yield
    finally:
        _remove(path)


def _remove(path: str) -> None:
    if jax.process_index() == 0 and is_bucket(path):
        bucket = Bucket(path)
        for name in bucket.entries():
            bucket.remove(name)
    if jax.process_index() == 0 or is_bucket(path):
        local = mirror_folder(path)
        for folder in [local, *local.parent.glob(f"{local.name}.process-*")]:
            shutil.rmtree(folder, ignore_errors=True)


def _on_first_process(checks: Callable[[], list[Check]]) -> list[Check]:
    """Runs the checks on process 0, and returns nothing on the others."""
    return checks() if jax.process_index() == 0 else []
