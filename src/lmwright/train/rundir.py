"""The run directory: complete in itself, owned by one run, used by one process at a time.

run.toml plan.json env.json metrics.jsonl checkpoints/ report.html
"""

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lmwright.config.load import dump_toml, same_folder
from lmwright.config.run import Run
from lmwright.config.text import read_toml
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.guard.files import remove_leftovers, write_whole
from lmwright.guard.redact import MARK, redact_tree, without_secrets
from lmwright.program.plan import Plan
from lmwright.train.environment import write_env
from lmwright.train.log import errors_to_file

# What may differ between sessions of one run: nothing that changes what is learned, but how
# long, where and how it is watched.
FREE = ("name", "dir", "mesh", "eval", "checkpoint", "metrics", "limits")
FREE_TRAIN = ("steps", "epochs", "remat", "context_attention", "init_from")
FREE_DATA = ("dir", "workers")
FREE_ADAPTER = ("steps", "rows", "patience", "init_from", "data")  # data: by its fingerprint

MOST_SHOWN = 6  # fields in a message
LONGEST_SHOWN = 60


@contextmanager
def claim(run: Run, plan: Plan) -> Iterator[Path]:
    """The run's directory, locked and described. Raises UserError if it belongs to another run, is
    in use, or cannot be written."""
    folder = Path(run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise UserError(
            f"dir: {folder} cannot be written ({error.strerror}); choose another with dir="
        ) from error
    try:
        _take(run, plan, folder, lock)
        with errors_to_file(folder, jax.process_index()):
            yield folder
    finally:
        os.close(lock)


def _take(run: Run, plan: Plan, folder: Path, lock: int) -> None:
    """Locks and describes the directory on process 0; the others continue after that, or are
    refused with it."""
    refused = None
    try:
        if jax.process_index() == 0:
            _lock(lock, folder)
            refuse_other_run(run, folder)
            _note_move(run, folder)
            remove_leftovers(folder)
            text = dump_toml(run)
            write_whole(folder / "run.toml", text)
            if MARK in text:  # a URL may hold more than was known to be a credential
                (folder / "run.toml").chmod(0o600)
            write_whole(folder / "plan.json", plan.to_json())
            write_env(folder)
    except UserError as error:
        refused = error
    if jax.process_count() > 1:
        ready = multihost_utils.broadcast_one_to_all(np.bool_(refused is None))
        if not ready and refused is None:
            refused = UserError(f"dir: {folder} was refused by process 0; see its message")
    if refused is not None:
        raise refused


def _note_move(run: Run, folder: Path) -> None:
    """Reports that the directory was moved or copied since it was last trained."""
    file = folder / "run.toml"
    written = read_toml(file)[0].get("dir") if file.exists() else None
    if isinstance(written, str) and not same_folder(folder, written):
        print(
            f"{folder}: its run.toml says dir = {written!r}, where it was before; continuing here"
        )


def _lock(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(
            f"dir: {folder} is being trained by another process; wait for it or choose dir="
        ) from error


def refuse_other_run(run: Run, folder: Path) -> None:
    """Raises UserError with the fields in which the directory's run differs, both values of each,
    and how to continue it."""
    if not (folder / "run.toml").exists():
        if (folder / "checkpoints").exists():
            raise UserError(f"dir: {folder} has checkpoints but no run.toml; choose another dir=")
        return
    before = load_run(folder / "run.toml", [])
    then, now = identity(before), identity(run)
    _in_both(then, now)
    changed = sorted(differences(then, now))
    if changed:
        fields = [
            f"{path} is {_show_value(then, path)} there and {_show_value(now, path)} here"
            for path in changed[:MOST_SHOWN]
        ]
        more = len(changed) - MOST_SHOWN
        raise UserError(
            f"dir: {folder} belongs to another run: {', '.join(fields)}"
            f"{f', and {more} more fields differ' if more > 0 else ''}; continue that one with "
            f"`lmwright train {shlex.quote(str(folder))}`, or choose another dir= for this one"
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


def identity(run: Run) -> dict[str, Any]:
    """The part of a run that its checkpoints depend on."""
    fields = redact_tree(asdict(run), without_secrets)  # a new token makes no new run
    for name in FREE:
        fields.pop(name)
    for section, names in (("train", FREE_TRAIN), ("data", FREE_DATA)):
        fields[section] = {k: v for k, v in fields[section].items() if k not in names}
    fields["data"]["tokenizer"].pop("vocab_size")  # by the store's fingerprint
    if fields["lora"] and fields["lora"]["adapters"]:  # each is kept or dropped by itself
        fields["train"].pop("global_batch_size")
        fields["lora"]["adapters"] = {
            adapter["name"]: {k: v for k, v in adapter.items() if k not in FREE_ADAPTER}
            for adapter in fields["lora"]["adapters"]
        }
    return fields


def _in_both(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Keeps only the adapters that both runs have: others may be added or removed."""
    each = [fields["lora"]["adapters"] if fields["lora"] else None for fields in (before, now)]
    if all(isinstance(adapters, dict) for adapters in each):
        for adapters, other in (each, each[::-1]):
            for name in adapters.keys() - other.keys():
                del adapters[name]


def differences(a: Any, b: Any, prefix: str = "") -> set[str]:
    """Dotted paths at which two nested dicts differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        paths: set[str] = set()
        for name in a.keys() | b.keys():
            path = f"{prefix}.{name}" if prefix else name
            paths |= differences(a.get(name), b.get(name), path)
        return paths
    return set() if _plain(a) == _plain(b) else {prefix}


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def keep_tokenizer(folder: Path, store: TokenStore) -> None:
    """Copies the data's tokenizer, so that the directory can be moved and used alone."""
    copy = folder / "tokenizer"
    if jax.process_index() != 0 or copy.exists():
        return
    temporary = folder / ".tokenizer.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(store.tokenizer_dir, temporary)
    os.replace(temporary, copy)
