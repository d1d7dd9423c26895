"""The checkpoints of a run directory, to read.

Nothing in the directory is written, moved or removed, so a run that trains there does not notice:
no Orbax manager, which may clean up, only its handlers. A checkpoint that is damaged, or that the
run retires while it is read, leads to another one.
"""

import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from lmwright.checkpoint.files import Stamps, StepFiles, for_orbax, root_of
from lmwright.checkpoint.hashes import Unusable, read_meta, verify
from lmwright.core.finite import not_finite
from lmwright.core.param import Tree, first_difference
from lmwright.core.processes import from_first, of_all
from lmwright.errors import StorageError, UserError, first_line

ATTEMPTS = 100

Abstract = Tree | Callable[[Tree], Tree]


@dataclass
class SavedStates:
    """Saved states of the runs of a directory. With several processes all must call the same
    methods."""

    run_dir: Path
    warn: Callable[[str], None] = field(
        default=lambda line: print(line, file=sys.stderr), kw_only=True
    )

    def __post_init__(self) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax narrates every save
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # tracebacks of what is repeated
        self.files = root_of(self.run_dir)
        self.root = self.files.path

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        try:
            return self.files.steps()
        except OSError as error:
            raise UserError(f"{self.root}: cannot be read ({error.strerror})") from error

    def restore(self, abstract: Abstract) -> tuple[Tree, dict[str, Any]] | None:
        """State and meta of the newest checkpoint that is whole and finite, or None where there
        is none.

        `abstract` may be a function from the shapes that were saved to those that are wanted.

        Raises UserError if checkpoints exist but none can be used, or if their shapes are
        another model's.
        """
        problems: dict[int, str] = {}
        while len(problems) < ATTEMPTS:
            step = self._newest(problems)
            if step is None:
                break
            try:
                restored = self._read(step, abstract, newest=step > max(problems, default=-1))
            except Unusable as error:
                problems[step] = str(error)
                self._reject(step, str(error))
                continue
            self._fell_back(problems, step)
            return restored
        else:
            raise UserError(
                f"{self.root}: the run deletes its checkpoints faster than they can be read; give "
                "it a larger checkpoint.keep_last"
            )
        if error := self._none_left(problems):
            raise error
        return None

    def restore_at(self, step: int, abstract: Abstract) -> tuple[Tree, dict[str, Any]]:
        """State and meta of one checkpoint. Raises UserError if it is not there, damaged or not
        finite."""
        try:
            if self._agreed(None if step in self.steps() else "is not there"):
                raise Unusable("is not there")
            return self._read(step, abstract, newest=step == max(self.steps(), default=step))
        except Unusable as error:
            steps = self.steps()
            if step in steps:
                raise UserError(f"{self.root / str(step)}: {error}; choose another") from error
            there = ", ".join(map(str, steps)) or "none"
            raise UserError(
                f"{self.root}: there is no checkpoint {step}; there are: {there}"
            ) from error

    def shapes(self, step: int) -> Tree:
        """Leaves of the state in a checkpoint, with `shape` and `dtype`."""
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            return checkpointer.metadata(self._state_dir(step)).item_metadata.tree

    def _state_dir(self, step: int) -> Any:
        return for_orbax(self.root) / str(step) / "state"

    def _read(self, step: int, abstract: Abstract, *, newest: bool) -> tuple[Tree, dict[str, Any]]:
        """Reads a checkpoint. Raises Unusable, on all processes alike."""
        files = self.files.step(step)
        before, vouched = self._verified(files, newest)
        state, meta, problem = None, {}, None
        try:
            state, meta = self._load(step, abstract), read_meta(files)
        except (UserError, Unusable):
            raise
        except Exception as error:
            _hush()
            if vouched and _unchanged(files, before):
                raise StorageError(
                    f"{files.path}: its files are what was saved, but they cannot be loaded "
                    f"({first_line(error):.200}); check that there is enough memory and disk "
                    "space and run again"
                ) from error
            problem = f"is damaged: it cannot be read ({first_line(error):.200})"
        if problem is None and not _unchanged(files, before):
            problem = "is damaged: a file was altered or removed while it was read"
        if problem := self._agreed(problem):
            raise Unusable(problem)
        if bad := not_finite(state):
            raise Unusable(f"is not finite: {bad} holds NaN or infinities")
        if not vouched:
            self._unhashed(step)
        return state, meta

    def _verified(self, files: StepFiles, newest: bool) -> tuple[Stamps, bool]:
        """Stamps of the files, taken before they are compared with their hashes, and whether there
        were any hashes. Process 0 compares."""
        problem, vouched, before = None, True, {}
        try:
            before = files.stamps()
            if jax.process_index() == 0:
                vouched = verify(files, newest=newest)
        except Unusable as error:
            problem = str(error)
        except OSError as error:
            problem = f"is damaged: it cannot be read ({error.strerror})"
        if problem := self._agreed(problem):
            raise Unusable(problem)
        return before, bool(from_first(vouched))

    def _load(self, step: int, abstract: Abstract) -> Tree:
        shapes = self.shapes(step)
        if callable(abstract):
            abstract = abstract(shapes)
        check_shapes(shapes, abstract, self.root / str(step))
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            wanted = ocp.args.StandardRestore(abstract)
            return checkpointer.restore(self._state_dir(step), args=wanted)

    def _newest(self, tried: dict[int, str]) -> int | None:
        """The newest step not tried yet, as process 0 sees it."""
        steps = [step for step in self._in_use() if step not in tried]
        newest = int(from_first(np.int32(steps[-1] if steps else -1)))
        return None if newest < 0 else newest

    def _in_use(self) -> list[int]:
        """Committed steps that are looked at, oldest first."""
        return self.steps()

    def _agreed(self, problem: str | None) -> str | None:
        """Problem that any process has, on all of them."""
        damaged = of_all(problem is not None).any()
        return problem or ("is damaged, as another process found" if damaged else None)

    def _still_there(self, problems: dict[int, str]) -> list[int]:
        return sorted(problems.keys() & set(self.steps()))

    # What is done about a checkpoint that cannot be used: to a reader it may just be an old one
    # that the run retired, so it is told at the end, if it is still there.

    def _reject(self, step: int, problem: str) -> None:
        """Reports a checkpoint that cannot be used."""

    def _unhashed(self, step: int) -> None:
        """Reports a checkpoint in use that no hashes vouch for."""
        self._tell(f"checkpoint {step} has no hashes, so its files could not be checked")

    def _fell_back(self, problems: dict[int, str], step: int) -> None:
        """Reports that step `step` is used in place of others."""
        for each in self._still_there(problems):
            if each > step:
                self._tell(f"checkpoint {each} {problems[each]}; using {step}")

    def _none_left(self, problems: dict[int, str]) -> UserError | None:
        lines = [f"{step} {problems[step]}" for step in self._still_there(problems)]
        if not lines:
            return None
        return UserError(
            f"{self.root}: no checkpoint can be used: {'; '.join(lines)}; train the run again"
        )

    def _tell(self, line: str) -> None:
        if jax.process_index() == 0:
            self.warn(line)


def _hush() -> None:
    """Silences tasks of Orbax that a failed read leaves behind. They print tracebacks when they are
    collected, long after; what went wrong is known by then."""
    before = sys.unraisablehook
    if getattr(before, "hushes", False):
        return

    def hook(unraisable: Any) -> None:
        frames = [frame.filename for frame in traceback.extract_tb(unraisable.exc_traceback)]
        closed = str(unraisable.exc_value) == "Event loop is closed"
        if not closed and not any("orbax" in name for name in frames):
            before(unraisable)

    hook.hushes = True
    sys.unraisablehook = hook


def _unchanged(files: StepFiles, before: Stamps) -> bool:
    try:
        return files.stamps() == before
    except OSError:
        return False


def check_shapes(saved: Any, wanted: Tree, where: Any) -> None:
    """Raises UserError where a checkpoint's leaves are not those of `wanted`."""
    theirs = {jax.tree_util.keystr(p): tuple(leaf.shape)
              for p, leaf in jax.tree_util.tree_leaves_with_path(dict(saved))}  # fmt: skip
    ours = {jax.tree_util.keystr(p): tuple(leaf.shape)
            for p, leaf in jax.tree_util.tree_leaves_with_path(wanted)}  # fmt: skip
    if difference := first_difference(theirs, ours):
        name, there, here = difference
        raise UserError(
            f"{where}: {name} is {there} in the checkpoint and {here} in this run; use the run "
            f"file it was trained with, or another dir="
        )
