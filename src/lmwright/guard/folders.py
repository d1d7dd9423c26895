"""Copies of small folders that are whole or not there, also after a kill or a power loss."""

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
