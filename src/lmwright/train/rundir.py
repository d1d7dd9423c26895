"""The run directory: complete in itself, owned by one run, used by one process at a time.

run.toml plan.json env.json metrics.jsonl checkpoints/ report.html

One in a bucket has a mirror on the machine of each process, where all but the checkpoints is
written first (`storage/mirror.py`), and is claimed for all machines (`storage/claim.py`).
"""

import fcntl
import json
import os
import shlex
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lmwright.checkpoint.files import StepFiles, root_of
from lmwright.checkpoint.hashes import Unusable, read_meta
from lmwright.config.check import refuse_own_data
from lmwright.config.kept import is_kept, same_folder
from lmwright.config.load import dump_toml
from lmwright.config.run import UNCHOSEN, Run
from lmwright.config.text import read_toml
from lmwright.core.processes import from_first
from lmwright.data.rows.store import TokenStore
from lmwright.errors import TransientError, UserError, first_line
from lmwright.formats.open import load_run
from lmwright.guard.files import remove_leftovers, write_whole
from lmwright.guard.folders import copy_folder
from lmwright.guard.urls import MARK
from lmwright.program.plan import Plan
from lmwright.report.goodput import read_sessions
from lmwright.report.ledger import KILLED
from lmwright.storage.bucket import is_bucket
from lmwright.storage.claim import Claim
from lmwright.storage.mirror import LOCK, Mirror, mirror_folder, shown
from lmwright.train.environment import write_env
from lmwright.train.hooks import Hook, Running
from lmwright.train.identity import differences, identity, keep_shared
from lmwright.train.log import errors_to_file
from lmwright.train.metrics import METRICS_FILE
from lmwright.train.publishing import check_publishing
from lmwright.train.start import forget_start, has_checkpoints, has_trained

MOST_SHOWN = 6  # fields in a message
LONGEST_SHOWN = 60
READERS_S = 20.0


@dataclass
class RunFolder:
    """A run directory that this process may write."""

    path: Path
    """Path on this machine."""
    mirror: Mirror | None = None
    """Mirror of a run directory in a bucket; None for one on this machine alone."""
    claim: Claim | None = None
    """Claim on the bucket; process 0 holds it."""
    described: bool = False
    """True once the run is written down there in this session."""

    def push(self) -> None:
        """Sends what was written to the bucket. Raises UserError if another process has taken the
        run over."""
        if self.mirror is not None:
            self.mirror.push()

    def confirm(self) -> None:
        """Raises UserError if another process has taken the run over; asks the bucket."""
        if self.claim is not None:
            self.claim.confirm()

    def check(self) -> None:
        """Raises UserError if another process is known to have taken the run over; the bucket is
        not asked."""
        if self.claim is not None:
            self.claim.check()


class KeepClaim(Hook):
    """Ends a run that another process has taken over."""

    def __init__(self, folder: RunFolder):
        self._folder = folder

    def after_step(self, session: Running, step: int) -> None:
        self._folder.check()

    def before_save(self, session: Running, step: int) -> None:
        self._folder.push()


@contextmanager
def claim(run: Run, plan: Plan) -> Iterator[RunFolder]:
    """The run's directory, locked and described. Raises UserError if it belongs to another run, is
    in use, or cannot be written."""
    with ExitStack() as stack:
        folder = _folder(run)
        if jax.process_count() == 1:  # several are refused together, in their folder
            check_publishing(run, plan.training)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder.path / LOCK, os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise UserError(
                f"dir: {folder.path} cannot be written ({error.strerror}); choose another with dir="
            ) from error
        stack.callback(os.close, lock)
        _take(run, plan, folder, lock, stack)
        stack.enter_context(errors_to_file(folder.path, jax.process_index()))
        yield folder


def _folder(run: Run) -> RunFolder:
    """The folder of this process: for a run in a bucket each has one of its own."""
    path = mirror_folder(run.dir)
    if not is_bucket(run.dir):
        return RunFolder(path)
    if jax.process_index():
        path = path.with_name(f"{path.name}.process-{jax.process_index()}")
    folder = RunFolder(path)
    folder.mirror = Mirror(run.dir, path, check=folder.confirm)
    return folder


def _take(run: Run, plan: Plan, folder: RunFolder, lock: int, stack: ExitStack) -> None:
    """Locks and describes the directory on process 0; the others continue after that, or are
    refused with it."""
    refused = None
    try:
        if folder.mirror is not None:
            folder.mirror.begin()
        if jax.process_index() == 0:
            check_publishing(run, plan.training)
            _lock(lock, run)
            if folder.mirror is not None:
                folder.claim = Claim(folder.mirror.bucket)
                stack.callback(folder.claim.close)
                folder.mirror.pull()
            _describe(run, plan, folder)
        if folder.mirror is not None:
            stack.callback(folder.mirror.close)
            folder.push()
            folder.mirror.push_behind()
    except UserError as error:
        refused = error
    mine = 0 if refused is None else 2 if isinstance(refused, TransientError) else 1
    verdict = int(from_first(np.int32(mine)))
    if verdict and refused is None:
        kind = TransientError if verdict == 2 else UserError
        refused = kind(f"dir: {run.dir} was refused by process 0; see its message")
    if refused is not None:
        raise refused


def _describe(run: Run, plan: Plan, folder: RunFolder) -> None:
    _refuse_own_file(folder.path)
    refuse_other_run(run, folder.path)
    refuse_lost_checkpoints(run, folder.path)
    _note_move(run, folder.path)
    remove_leftovers(folder.path)
    if not has_trained(folder.path):
        forget_start(folder.path)
    if not (folder.path / "run.toml").exists():
        _write_down(run, plan, folder)


def _refuse_own_file(folder: Path) -> None:
    """Raises UserError where the user's own run file has the name that the run's has."""
    file = folder / "run.toml"
    if file.exists() and not is_kept(file):
        raise UserError(
            f"dir: {file} would be replaced by the settings of this run; choose another dir, or "
            "give that file another name"
        )


def describe(run: Run, plan: Plan, folder: RunFolder) -> None:
    """Writes down the run that the directory goes on with, once its state, its data and all else is
    known to fit: a run that is refused leaves the directory as it was."""
    if jax.process_index() == 0 and not folder.described:
        _write_down(run, plan, folder)


def _write_down(run: Run, plan: Plan, folder: RunFolder) -> None:
    text, file = dump_toml(run), folder.path / "run.toml"
    write_whole(folder.path / "plan.json", _plan_json(run, plan))
    write_env(folder.path)
    write_whole(file, text)  # last, so that it is never alone, as a user's own
    if MARK in text:  # a URL may hold more than was known to be a credential
        file.chmod(0o600)
    folder.described = True


def _plan_json(run: Run, plan: Plan) -> str:
    """Everything that was derived from the run, and what was chosen for its devices."""
    device = plan.devices[0]
    facts = {
        "mesh": dict(plan.mesh.shape),
        "devices": {
            "count": plan.mesh.size, "kind": device.device_kind, "platform": device.platform,
        },
        "compute": plan.compute.__dict__,
        "chosen": {"train.remat": plan.compute.remat} if run.train.remat in UNCHOSEN else {},
        "seq_len": plan.seq_len,
        "num_params": plan.num_params,
        "tokens_per_step": plan.tokens_per_step,
        "flops_per_step": plan.flops_per_step,
        "tokens": plan.seq_len * sum(t.rows * t.steps for t in plan.training.trainees),
    }  # fmt: skip
    return json.dumps(facts, indent=1)


def _note_move(run: Run, folder: Path) -> None:
    """Reports that the directory was moved or copied since it was last trained."""
    file = folder / "run.toml"
    written = read_toml(file)[0].get("dir") if file.exists() else None
    here = shown(folder)
    if isinstance(written, str) and not same_folder(here, written):
        print(f"{here}: its run.toml says dir = {written!r}, where it was before; continuing here")


def _lock(lock: int, run: Run) -> None:
    """Locks a run directory. Whoever reads one in a bucket holds the lock while its mirror is
    brought up to date, and is waited for."""
    end = time.monotonic() + (READERS_S if is_bucket(run.dir) else 0.0)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise UserError(
                    f"dir: {run.dir} is being trained by another process; wait for it or choose "
                    "dir="
                ) from error
        time.sleep(0.1)


def refuse_other_run(run: Run, folder: Path) -> None:
    """Raises UserError with the fields in which the directory's run differs, both values of each,
    and how to continue it. Where its run.toml is lost, the newest checkpoint tells its run."""
    if (folder / "run.toml").exists():
        before = load_run(folder / "run.toml", [])
    elif steps := root_of(folder).steps():
        before = _run_of(root_of(folder).step(steps[-1]), run.dir)
    else:
        refuse_own_data(run)
        return
    if run.train.init_from and not before.train.init_from and root_of(folder).steps():
        raise UserError(
            f"train.init_from: {run.dir} began without it and would continue from its own "
            f"checkpoint; leave it out, or choose another dir= to start from {run.train.init_from}"
        )
    then, now = identity(before), identity(run)
    keep_shared((before, run), (then, now))
    changed = sorted(differences(then, now))
    if changed and has_trained(folder):
        fields = [
            f"{path} is {_show_value(then, path)} there and {_show_value(now, path)} here"
            for path in changed[:MOST_SHOWN]
        ]
        more = len(changed) - MOST_SHOWN
        other = f" (train.init_from = {run.dir!r} starts it from these weights)"
        if not has_checkpoints(folder) and not _saves(folder):
            other = ", or remove it, as it has saved nothing yet"
        raise UserError(
            f"dir: {run.dir} belongs to another run: {', '.join(fields)}"
            f"{f', and {more} more fields differ' if more > 0 else ''}; continue that one with "
            f"`lmwright train {shlex.quote(run.dir)}`, or choose another dir= for this one{other}"
        )


def _saves(folder: Path) -> set[bytes]:
    """The saves that a run directory's metrics tell of, each by its step."""
    metrics = folder / METRICS_FILE
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    return {line.partition(b",")[0] for line in lines if b'"kind": "checkpoint"' in line}


def _run_of(files: StepFiles, where: str) -> Run:
    """The run that a checkpoint was saved by."""
    try:
        return load_run(tomllib.loads(read_meta(files)["run"]), [])
    except (Unusable, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"dir: {where} has no run.toml, and its newest checkpoint does not say which run it is "
            f"of ({first_line(error)}); choose another dir="
        ) from None


def refuse_lost_checkpoints(run: Run, folder: Path) -> None:
    """Raises UserError for a directory that had checkpoints and has none: the run would start over
    and drop what it has measured. Those that are damaged are in a folder of their own."""
    metrics, root = folder / METRICS_FILE, root_of(folder)
    if not metrics.exists() or has_checkpoints(folder):
        return
    # the only save of a session that was killed may not have been whole
    ended = (each for each in read_sessions(folder) if each.get("end") != KILLED)
    if len(_saves(folder)) > 1 or any(each["last_step"] for each in ended):
        raise UserError(
            f"dir: {run.dir} had checkpoints and has none; put them back into {root.path}, or "
            f"remove {metrics} to start over"
        )


def _show_value(fields: dict[str, Any], path: str) -> str:
    """Value for a message, as a run file has it."""
    value: Any = fields
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        return "unset"
    text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def keep_tokenizer(folder: Path, store: TokenStore) -> None:
    """Copies the data's tokenizer, so that the directory can be moved and used alone."""
    copy = folder / "tokenizer"
    if jax.process_index() != 0 or copy.exists():
        return
    copy_folder(Path(store.tokenizer_dir), copy)
