"""Publishes checkpoints while the training goes on: `train.publish_every_steps`.

    after_save --> wait for the checkpoint on disk --> `lmwright publish` in a process of its own

The devices stay the training's: the other process computes on the host's CPU. What fails there is
told once, ends nothing, and is tried again with the next checkpoint that is due.
"""

import os
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import jax

from lmwright.checkpoint.saved import SavedStates
from lmwright.config.run import Run
from lmwright.core.processes import meet
from lmwright.errors import ERROR, UserError
from lmwright.formats.hf_layout import slots
from lmwright.guard.heartbeat import beat, beating
from lmwright.program.trainee import Training
from lmwright.publish.account import check_name, check_token
from lmwright.publish.licenses import check_license
from lmwright.storage.hub import is_hub_name
from lmwright.train.hooks import Hook, Running

LOG = "publish.log"
PATIENCE_S = 1.0  # between looks at what another thread or process does
NICENESS = 10


def check_publishing(run: Run, training: Training) -> None:
    """Raises UserError for a run that could never publish its checkpoints, from what is known
    here; the hub is not asked, since a training must start without it."""
    if run.train.publish_every_steps is not None:
        check_name(run.publish.repo)
        check_license(run.publish.license, None, "publish.license")
        check_token()
        if training.freezes:
            _check_adapters(run, training)
        else:
            slots(run.model)  # refuses what Hugging Face has no names for


def _check_adapters(run: Run, training: Training) -> None:
    from lmwright.formats.adapter_verbs import refuse_folder

    for adapter in training.trainees:
        refuse_folder(run, adapter, run.dir)
    if not is_hub_name(str(run.train.init_from)):
        raise UserError(
            "train.publish_every_steps: publishes adapters, whose base train.init_from has no name "
            "on the hub; start from hf://owner/name, or publish at the end with --base-model"
        )


def publishing(run: Run, folder: Path, stack: ExitStack) -> tuple[Hook, ...]:
    """The hook of a run that publishes; what it does ends with the stack."""
    if run.train.publish_every_steps is None:
        return ()
    publisher = Publisher(run, folder)
    stack.callback(publisher.close)
    return (publisher,)


class Attempt(threading.Thread):
    """Publishes one checkpoint once it is saved; `problem` says why that failed."""

    def __init__(self, run: Run, step: int, log: Path):
        super().__init__(daemon=True)
        self.step, self.problem = step, ""
        self._run, self._log = run, log
        self._stopped = threading.Event()
        self._process: subprocess.Popen | None = None

    def run(self) -> None:
        """Waits for the checkpoint, then for the other process."""
        try:
            self._publish()
        except Exception as error:  # whatever it is, the training goes on
            self.problem = str(error) or type(error).__name__

    def stop(self) -> None:
        """Ends the attempt, and the other process."""
        self._stopped.set()
        if self._process is not None:
            self._process.kill()
        self.join(10 * PATIENCE_S)

    def _publish(self) -> None:
        saved = SavedStates(Path(self._log.parent))
        while self.step not in saved.steps():
            if self._stopped.wait(PATIENCE_S):
                return
        place = f"{self._run.dir.rstrip('/')}/checkpoints/{self.step}"
        words = [sys.executable, "-m", "lmwright", "publish", place]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "TQDM_DISABLE": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env
            )
            if self._stopped.is_set():
                self._process.kill()
            with suppress(OSError):  # it may have ended
                os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
            code = self._process.wait()
        if code:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = lines[-1] if lines else f"exit code {code}"
            self.problem = last.removeprefix(ERROR)


class Publisher(Hook):
    """Publishes the first checkpoint saved after every `train.publish_every_steps`, and the last
    of the run, one at a time."""

    def __init__(self, run: Run, folder: Path):
        self._run, self._log = run, folder / LOG
        self._every = run.train.publish_every_steps or 0
        self._periods: int | None = None
        """Periods of `every` whose checkpoint was published, or was found too late for it."""
        self._saved = 0
        self._attempt: Attempt | None = None
        self._told = ""

    def after_step(self, session: Running, step: int) -> None:
        if self._periods is None:
            self._periods = (step - 1) // self._every
        if self._attempt is not None and not self._attempt.is_alive():
            self._tell(session, self._attempt)
            self._attempt = None

    def after_save(self, session: Running, step: int) -> None:
        self._saved = step
        if jax.process_index() == 0 and self._attempt is None:
            if step // self._every > (self._periods or 0):
                self._begin(step)

    def at_end(self, session: Running, step: int, exit_code: int) -> None:
        if jax.process_index() == 0 and self._saved and exit_code == 0:
            published = self._wait(session)
            if published != step and session.stop.exit_code is None:
                self._begin(step)
                self._wait(session)
        if jax.process_count() > 1 and exit_code == 0:  # else the others would not wait as long
            with beating("end"):
                meet("the last checkpoint is published")

    def close(self) -> None:
        """Ends what is still going on."""
        if self._attempt is not None:
            self._attempt.stop()

    def _begin(self, step: int) -> None:
        self._periods = step // self._every
        self._attempt = Attempt(self._run, step, self._log)
        self._attempt.start()

    def _wait(self, session: Running) -> int | None:
        """Waits for an attempt unless asked to stop; the step that it published."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return None
        session.display.note(f"publishing step {attempt.step} as {self._run.publish.repo}")
        while attempt.is_alive():
            attempt.join(PATIENCE_S)
            beat("end")
            if session.stop.exit_code is not None:
                attempt.stop()
                session.display.note(f"step {attempt.step} was not published; lmwright publish can")
                return None
        self._tell(session, attempt)
        return None if attempt.problem else attempt.step

    def _tell(self, session: Running, attempt: Attempt) -> None:
        repo = self._run.publish.repo
        if not attempt.problem:
            session.metrics.event("published", step=attempt.step, repo=repo)
            session.display.note(f"step {attempt.step} is published as {repo}")
            self._told = ""
            return
        session.metrics.event("publish failed", step=attempt.step, problem=attempt.problem)
        if attempt.problem != self._told:
            session.display.note(
                f"step {attempt.step} was not published: {attempt.problem}; training continues, "
                f"and the next one is tried ({self._log})"
            )
            self._told = attempt.problem
