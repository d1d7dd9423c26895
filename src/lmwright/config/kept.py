"""The run file in a run directory: which one it is, and where its run was made."""

import os
from pathlib import Path
from typing import Any

from lmwright.storage.bucket import is_bucket
from lmwright.storage.mirror import shown

# Beside a run.toml, these tell a run directory from a folder with a user's run file.
OF_RUN_DIRECTORY = ("env.json", "metrics.jsonl")


def find_moved(path: Path, written: Any) -> str | None:
    """Run directory that contains a run file, if it was moved or copied since the file was written;
    None for any other run file."""
    if not is_kept(path) or not isinstance(written, str):
        return None
    folder = path.parent
    here = shown(folder)
    return None if same_folder(here, written) else here


def made_in(path: Path, written: Any) -> Path | None:
    """Folder to which the paths in a run directory's run file are relative, told by the end that
    its own path has; None where it is not known."""
    if not is_kept(path) or not isinstance(written, str) or "://" in written:
        return None
    own, here = Path(os.path.normpath(written)).parts, Path(os.path.abspath(path.parent)).parts
    if os.path.isabs(written) or here[-len(own) :] != own:
        return None
    folder = Path(*here[: -len(own)])
    return folder if path.is_absolute() else Path(os.path.relpath(folder))


def is_kept(path: Path) -> bool:
    """True for the run file in a run directory."""
    beside = any((path.parent / name).exists() for name in OF_RUN_DIRECTORY)
    return path.name == "run.toml" and beside


def same_folder(folder: str | Path, written: str) -> bool:
    """True if a `dir` that was written down, perhaps elsewhere or long ago, is this folder."""
    if is_bucket(folder) or is_bucket(written):
        return str(folder).rstrip("/") == written.rstrip("/")
    folder = Path(folder)
    try:
        return folder.samefile(written)
    except (OSError, ValueError):
        return False
