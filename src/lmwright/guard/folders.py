"""Folders that are whole or not there, also after a kill or a power loss."""

import ctypes
import os
import shutil
from pathlib import Path

from lmwright.guard.files import sync


def copy_folder(source: Path, target: Path) -> None:
    """Copies the files of a folder beside their place, and renames the copy: `target` must not be
    there yet, and one process may make it at a time. Raises the OSError of the file that cannot be
    read or written, and leaves nothing behind."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        temporary.mkdir(parents=True)
        for path in sorted(source.rglob("*")):
            copy = temporary / path.relative_to(source)
            if path.is_dir():
                copy.mkdir()
            else:
                shutil.copy2(path, copy)  # which keeps to its owner what is private
                sync(copy)
        os.replace(temporary, target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def exchange(one: Path, other: Path) -> bool:
    """Swaps what two names of one disk stand for, at one moment; False where the system or the disk
    cannot, and nothing has changed."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # of Linux
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(here, names[0], here, names[1], swap) == 0
