"""Checkpoints through Orbax: asynchronous, atomic, checked before they are trusted.

    checkpoints/<step>/state   the train state, any sharding
    checkpoints/<step>/meta    step, data position, the run as TOML
    checkpoints/<step>/hashes.json   size and xxh3 of every file

A checkpoint that is damaged or not finite is moved to `checkpoints.damaged/` by the run that
trains, and the one before it is used. Whoever only reads takes `saved.SavedStates`.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import multihost

from lmwright.checkpoint.files import HASHES, BucketRoot, StepFiles, for_orbax
from lmwright.checkpoint.hashes import (
    ORBAX_META,
    VERSION,
    Unusable,
    hash_files,
    refuse_unlisted,
)
from lmwright.checkpoint.saved import SavedStates, check_shapes
from lmwright.config.run import Checkpoint
from lmwright.core.param import Tree
from lmwright.core.processes import from_first, meet
from lmwright.errors import StorageError, UserError, first_line

__all__ = ["Checkpoints", "check_shapes"]

MIN_TIMEOUT_S = 240  # Orbax's waits are longer
JOINED = "state/manifest.ocdbt"  # written when the parts of all processes are
LONGEST_WRITE_S = 60  # of a thread whose save has failed
MOST_FAILURES = 6  # of saves, one after the other: two minutes


class _Save(NamedTuple):
    step: int
    state: Tree
    meta: dict[str, Any]
    began: float
    """Start of the save, by `time.monotonic`."""


class _Kept(NamedTuple):
    """Policy of Orbax by which checkpoints are kept."""

    kept: Callable[[Sequence[int]], set[int]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """True for each of the checkpoints that is kept."""
        kept = self.kept([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]


@dataclass
class Checkpoints(SavedStates):
    """The checkpoints of the run that trains in a directory, which no other process may do; a
    context manager that waits for open saves."""

    policy: Checkpoint = field(default_factory=Checkpoint)
    warn: Callable[[str], None] = field(default=print, kw_only=True)
    keep_due: bool = field(default=False, kw_only=True)
    """Keeps the newest checkpoint of a step at which a save is due beside the newest ones."""
    without_effect: Callable[[int], bool] = field(default=lambda step: False, kw_only=True)
    """Steps whose checkpoints the run has gone back behind, and no longer uses."""
    before_commit: Callable[[], None] = field(default=lambda: None, kw_only=True)
    """Called on process 0 when all of a checkpoint but its commit is written."""
    _last: "_Save | None" = field(default=None, init=False)
    _threads: set[threading.Thread] = field(default_factory=set, init=False)
    """Those of the last save, of which the first that fails is heard of."""
    _failures: int = field(default=0, init=False)
    """Failures of saves, one after the other."""
    _broken: BaseException | None = field(default=None, init=False)
    """Reason why this process, one of several, could not write its part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if jax.process_index() != 0:  # which may be early: the directory is process 0's to claim
            return
        try:
            self.files.make()
            self._remove_unfinished()  # by a process killed in a save
        except OSError as error:
            raise StorageError(f"{self.root}: cannot be written ({error.strerror}); "
                               f"choose another run directory with dir=") from error  # fmt: skip

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax's manager, opened at the first save: it reads all checkpoints that are there, so
        those that are damaged are out of its way by then."""
        self._set_aside_unlisted()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Kept(self._kept),
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._write_hashes,
                barrier_sync_fn=self._barrier if jax.process_count() > 1 else None,
                # else all threads of a save wait five minutes for a folder that cannot be made
                create_directories_asynchronously=False,
            ),
        )
        return ocp.CheckpointManager(for_orbax(self.root), options=options)

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barrier, but a process whose write failed does not enter it: there it would wait
        for the others, which wait for its write."""
        if (error := sys.exception()) is not None:
            self._broken = error
            raise error
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save in flight."""
        self.wait()
        if "_manager" in vars(self):
            self._manager.close()

    def wait(self) -> None:
        """Blocks until the last save is on disk. Raises UserError where it failed."""
        if "_manager" not in vars(self):
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            if not (self._clock_jumped(error) or self._may_pass()):
                raise _save_error(self.root, error) from error
            self._failures += 1
            self._save_again(error)
            self.wait()
        else:
            self._failures = 0

    def lost(self) -> bool:
        """True if the save in flight has failed, so that the next state should be saved at once.
        Raises StorageError where several processes save, who must all start again."""
        if self._broken is not None:
            raise _save_error(self.root, self._broken) from self._broken
        if "_manager" not in vars(self) or not self._may_pass():
            return False
        try:
            self._manager.check_for_errors()
        except Exception:
            return True
        return False

    def newest(self) -> int | None:
        """The newest step that is committed."""
        return self._manager.latest_step() if "_manager" in vars(self) else None

    def newest_due(self) -> int | None:
        """The newest step with a checkpoint at which a save was due."""
        newest = int(from_first(np.int32(self._newest_due(self._in_use()))))
        return None if newest < 0 else newest

    def _newest_due(self, steps: Sequence[int]) -> int:
        every = self.policy.save_every_steps
        return max((step for step in steps if step % every == 0), default=-1)

    def _in_use(self) -> list[int]:
        return [step for step in self.steps() if not self.without_effect(step)]

    def save(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Starts saving; blocks until the save before is on disk and the state is copied off the
        device."""
        self.wait()
        meta = {**meta, "step": step, "version": VERSION}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        self._last = _Save(step, state, meta, time.monotonic())
        try:
            if step not in self._manager.all_steps():
                self._start(step, args)
        except Exception as error:
            if not self._may_pass():
                raise _save_error(self.root, error) from error
            self._failures += 1
            self._save_again(error)

    def _start(self, step: int, args: ocp.args.Composite) -> None:
        before = set(threading.enumerate())
        try:
            self._manager.save(step, args=args, force=True)
        finally:
            begun = set(threading.enumerate()) - before
            self._threads = {thread for thread in begun if not thread.daemon}  # others never end

    def _clock_jumped(self, error: Exception) -> bool:
        """True if a save timed out although that time had not passed: Orbax reads the wall clock.
        The barriers of several processes do not."""
        early = time.monotonic() - self._last.began < MIN_TIMEOUT_S if self._last else False
        return (
            isinstance(error, TimeoutError)
            and early
            and self._failures == 0
            and jax.process_count() == 1
        )

    def _may_pass(self) -> bool:
        """True while the trouble of a bucket or a full disk may pass. Several processes are started
        again together instead, since the others do not know of it."""
        return jax.process_count() == 1 and self._failures < MOST_FAILURES

    def _save_again(self, error: Exception) -> None:
        """Saves the last state once more, or, if the step after has taken its memory, does
        without."""
        last, self._last = self._last, None
        manager = vars(self).pop("_manager", None)  # which may have failed to open
        with suppress(Exception):  # what failed may be told again
            manager and manager.close()
        for thread in self._threads:  # which write to the folder that is removed
            with suppress(Exception):
                thread.join(LONGEST_WRITE_S)
        pause = 2.0**self._failures
        if self._failures > 1 or not isinstance(self.files, BucketRoot):
            self._tell(f"{_unwritten(self.root, error)}; trying again in {pause:.0f} s")
        time.sleep(pause)
        self._remove_unfinished()
        if last and not any(leaf.is_deleted() for leaf in jax.tree.leaves(last.state)):
            self.save(last.step, last.state, last.meta)
        elif last:
            self._tell(f"checkpoint {last.step} was not kept: {first_line(error):.200}")

    def _remove_unfinished(self) -> None:
        for files in self.files.unfinished():
            self.files.remove(files)

    def _write_hashes(self) -> None:
        """Hashes the checkpoint that Orbax is about to commit (process 0). Raises OSError where it
        could not be loaded."""
        if jax.process_index() == 0:
            self.before_commit()
            for files in self.files.unfinished():
                if JOINED not in files.names():
                    raise OSError(f"{files.path}: its parts were not joined")
                _hash(files)

    # A checkpoint that cannot be used is moved away at once, so that its step can be saved again.

    def _unhashed(self, step: int) -> None:
        super()._unhashed(step)
        if jax.process_index() == 0:  # it will not be the newest for long
            _hash(self.files.step(step))

    def _reject(self, step: int, problem: str) -> None:
        self._tell(f"checkpoint {step} {problem}; using the one before")
        self._set_aside(step, problem)

    def _fell_back(self, problems: dict[int, str], step: int) -> None:
        """Does nothing: it was reported when the checkpoint was moved."""

    def _none_left(self, problems: dict[int, str]) -> UserError | None:
        if not problems:
            return None
        return UserError(
            f"{self.root}: no checkpoint can be used, and all were moved to checkpoints.damaged; "
            f"run again to start over"
        )

    def _set_aside_unlisted(self) -> None:
        for step in (steps := self.steps()):
            problem, past = None, False
            try:
                refuse_unlisted(self.files.step(step))
            except FileNotFoundError:
                problem = f"is damaged: {ORBAX_META} is missing"
                past = step not in self._kept(steps)  # a kill may have interrupted its removal
            except (Unusable, OSError) as error:
                problem = str(error)
            if problem := self._agreed(problem):
                if not past:
                    self._tell(f"checkpoint {step} {problem}; moved to checkpoints.damaged")
                self._set_aside(step, problem, keep=not past)

    def _kept(self, steps: Sequence[int]) -> set[int]:
        """Steps that are kept of all that have a checkpoint."""
        every, kept = self.policy.keep_every_steps, set(steps[-self.policy.keep_last :])
        if every is not None:
            kept |= {step for step in steps if step % every == 0}
        if self.keep_due:
            kept.add(self._newest_due(steps))
        return kept

    def _set_aside(self, step: int, problem: str, *, keep: bool = True) -> None:
        if jax.process_index() == 0:
            try:
                if keep:
                    self.files.set_aside(step)
                else:
                    self.files.remove(self.files.step(step))
            except OSError as error:
                done, cure = "moved to checkpoints.damaged", "move it there"
                if not keep:
                    done, cure = "removed", "remove it"
                raise StorageError(
                    f"{self.root / str(step)}: {problem}, and cannot be {done} "
                    f"({error.strerror}); {cure}"
                ) from error
        meet(f"checkpoint {step} is set aside")


def _hash(files: StepFiles) -> None:
    files.write(HASHES, json.dumps(hash_files(files)))


def _save_error(root: Any, error: BaseException) -> StorageError:
    cure = "free some space or correct the folder's permissions and "
    if isinstance(error, UserError):  # which names its own
        cure = ""
    return StorageError(f"{_unwritten(root, error)}; {cure}run again to continue")


def _unwritten(root: Any, error: BaseException) -> str:
    why = str(error) if isinstance(error, UserError) else f"{first_line(error):.200}"
    return f"{root}: the checkpoint could not be written ({why})"
