"""Checkpoints through Orbax: asynchronous, atomic, checked before they are trusted.

    checkpoints/<step>/state   the train state, any sharding
    checkpoints/<step>/meta    step, data position, the run as TOML
    checkpoints/<step>/hashes.json   size and xxh3 of every file, written after the commit

A damaged checkpoint is moved to `checkpoints.damaged/` and the one before it is used.
"""

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import xxhash
from jax.experimental import multihost_utils

from lmwright.core.param import Tree, first_difference
from lmwright.errors import UserError
from lmwright.run import Checkpoint, Mesh, Run

HASHES = "hashes.json"


@dataclass
class Checkpoints:
    """The checkpoints of one run directory; a context manager that waits for open saves."""

    run_dir: Path
    policy: Checkpoint = field(default_factory=Checkpoint)
    warn: Callable[[str], None] = print

    def __post_init__(self) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax narrates every save
        self.root = self.run_dir.absolute() / "checkpoints"
        self._hashing = threading.Lock()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.policy.keep_last,
            keep_period=self.policy.keep_every_steps,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_hashes),
        )
        try:
            self._manager = ocp.CheckpointManager(self.root, options=options)
        except OSError as error:
            raise UserError(f"{self.root}: cannot be written ({error.strerror}); "
                            f"choose another run directory with dir=") from error  # fmt: skip

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save in flight."""
        self.wait()
        self._manager.close()

    def wait(self) -> None:
        """Blocks until the last save is on disk. Raises UserError where it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise _save_error(self.root, error) from error
        self._write_hashes()

    def save(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Starts saving; blocks only to copy the state off the device."""
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave({**meta, "step": step})
        )
        try:
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise _save_error(self.root, error) from error

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return sorted(self._manager.all_steps(read=True))

    def restore(
        self, abstract: Tree | Callable[[Tree], Tree]
    ) -> tuple[Tree, dict[str, Any]] | None:
        """State and meta of the newest intact checkpoint, or None where there is none.

        `abstract` may be a function from the shapes that were saved to those that are wanted.

        Raises UserError if checkpoints exist but none can be used, or if their shapes are
        another model's.
        """
        steps = self.steps()
        for step in reversed(steps):
            problem = self._damage(step)
            if problem is None:
                try:
                    return self._restore_step(step, abstract)
                except UserError:
                    raise
                except Exception as error:
                    problem = f"cannot be read ({_first_line(error)})"
            self._set_aside(step, problem)
        if steps:
            raise UserError(
                f"{self.root}: every checkpoint is damaged and was moved to checkpoints.damaged; "
                f"run again to start over"
            )
        return None

    def restore_at(
        self, step: int, abstract: Tree | Callable[[Tree], Tree]
    ) -> tuple[Tree, dict[str, Any]]:
        """State and meta of one checkpoint. Raises UserError if it is not there or damaged."""
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{self.root}: there is no checkpoint {step}; there are: {there}")
        if problem := self._damage(step):
            raise UserError(f"{self.root / str(step)}: is damaged ({problem}); take another")
        return self._restore_step(step, abstract)

    def _restore_step(self, step: int, abstract: Tree) -> tuple[Tree, dict[str, Any]]:
        found = self.shapes(step)
        if callable(abstract):
            abstract = abstract(found)
        check_shapes(found, abstract, self.root / str(step))
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=args)
        return restored.state, restored.meta

    def shapes(self, step: int) -> Tree:
        """What a checkpoint's state holds: leaves with `shape` and `dtype`."""
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.metadata(self.root / str(step) / "state").item_metadata.tree

    def _damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint, the same on all hosts: process 0 looks."""
        problem = damage(self.root / str(step)) if jax.process_index() == 0 else None
        if jax.process_count() == 1:
            return problem
        found = multihost_utils.broadcast_one_to_all(np.bool_(problem is not None))
        return (problem or "its files are not what was saved") if found else None

    def _set_aside(self, step: int, problem: str) -> None:
        aside = self.run_dir / "checkpoints.damaged"
        if jax.process_index() == 0:
            self.warn(f"checkpoint {step} is damaged: {problem}; using the one before")
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / str(step), ignore_errors=True)
            os.replace(self.root / str(step), aside / str(step))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {step} is set aside")
        self._manager.reload()

    def _write_hashes(self) -> None:
        """Hashes every committed checkpoint that has none yet (process 0)."""
        if jax.process_index() != 0:
            return
        with self._hashing:
            for folder in self.root.iterdir():
                if not folder.name.isdigit() or (folder / HASHES).exists():
                    continue
                try:
                    write_atomically(folder / HASHES, json.dumps(hash_files(folder)))
                except FileNotFoundError:
                    continue  # retired by the keep policy in the meantime


def _save_error(root: Path, error: Exception) -> UserError:
    return UserError(
        f"{root}: the checkpoint could not be written ({_first_line(error)}); "
        f"free some space or fix the folder's permissions and run again to continue"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def write_atomically(path: Path, text: str) -> None:
    """The file is either as before or complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def hash_files(folder: Path) -> dict[str, list[Any]]:
    """{relative path: [bytes, xxh3_64]} of all files below, hashes.json left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != HASHES and not path.name.endswith(".tmp"):
            digest = xxhash.xxh3_64()
            with open(path, "rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
            found[str(path.relative_to(folder))] = [path.stat().st_size, digest.hexdigest()]
    return found


def damage(folder: Path) -> str | None:
    """What is wrong with a committed checkpoint, or None. One whose hashes were not written
    yet when the process died is left to Orbax's own checks."""
    try:
        expected = json.loads((folder / HASHES).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return f"{HASHES} is not JSON"
    found = hash_files(folder)
    for name, fact in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name][0] != fact[0]:
            return f"{name} has {found[name][0]} bytes instead of {fact[0]}"
        if found[name] != fact:
            return f"{name} was altered"
    return None


def check_shapes(saved: Any, wanted: Tree, where: Path) -> None:
    """Raises UserError where a checkpoint's leaves are not those of `wanted`."""
    theirs = {jax.tree_util.keystr(p): tuple(leaf.shape)
              for p, leaf in jax.tree_util.tree_leaves_with_path(dict(saved))}  # fmt: skip
    ours = {jax.tree_util.keystr(p): tuple(leaf.shape)
            for p, leaf in jax.tree_util.tree_leaves_with_path(wanted)}  # fmt: skip
    if found := first_difference(theirs, ours):
        name, there, here = found
        raise UserError(
            f"{where}: {name} is {there} in the checkpoint and {here} in this run; use the run "
            f"file it was trained with, or another dir="
        )


def load_run_weights(
    run_dir: str | Path, step: int | None = None, *, adapter: str | None = None
) -> tuple[Run, Tree]:
    """The run of a directory and its weights at a step, or the newest intact ones (the moving
    average where the run keeps one), on this process's first device; `adapter` names one of
    several, and is merged into its base. Raises UserError where there are none."""
    from lmwright.config import load_run
    from lmwright.plan.resolve import resolve
    from lmwright.train.state import abstract_state, eval_weights

    folder = Path(run_dir)
    if not (folder / "run.toml").exists():
        raise UserError(f"{folder}: not a run directory (no run.toml); train one first")
    run = load_run(folder / "run.toml", [])
    alone = replace(run, mesh=Mesh())
    plan = resolve(alone, jax.local_devices()[:1])
    if run.lora is not None:
        from lmwright.train.lora_restore import merged_weights

        return run, merged_weights(plan, folder, adapter, step)
    if adapter is not None:
        raise UserError(f"{folder}: trained all its weights and has no adapters; drop {adapter!r}")
    with Checkpoints(folder, run.checkpoint) as checkpoints:
        abstract = abstract_state(plan)
        if step is not None:
            return run, eval_weights(checkpoints.restore_at(step, abstract)[0])
        restored = checkpoints.restore(abstract)
    if restored is None:
        raise UserError(f"{folder}: has no checkpoint yet; train at least one step")
    return run, eval_weights(restored[0])
