"""Folders that are whole or not there, also after a kill or a power loss."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from lmwright.guard.files import sync
from lmwright.guard.temporary import temporary_file
from lmwright.guard.terminated import terminated_by_exit


def copy_folder(source: Path, target: Path) -> None:
    """Copies the files of a folder beside their place, and renames the copy: `target` must not be
    there yet; of several processes that make it at once one does, and others get FileExistsError.
    Raises the OSError of the file that cannot be read or written, by its name in the end. Leaves
    nothing behind, also where SIGTERM ends the process."""
    shutil.rmtree(target.with_name(f".{target.name}.tmp"), ignore_errors=True)  # earlier versions'
    temporary = temporary_file(target.parent, target.name)
    with terminated_by_exit():
        _copy(source, target, temporary)


def _copy(source: Path, target: Path, temporary: Path) -> None:
    try:
        temporary.mkdir(parents=True)
        for path in sorted(source.rglob("*")):
            copy = temporary / path.relative_to(source)
            if path.is_dir():
                copy.mkdir()
            else:
                shutil.copy2(path, copy)  # which keeps to its owner what is private
                sync(copy)
        _take(temporary, target)
        sync(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            _name_the_place(error, temporary, target)
        raise


def _name_the_place(error: OSError, temporary: Path, target: Path) -> None:
    """Puts the place into an error, instead of the hidden folder, which is of no use to the user,
    or of no name."""
    if error.filename is None:
        error.filename = str(target)
    for each in ("filename", "filename2"):
        name = getattr(error, each)
        if name is not None and Path(name).is_relative_to(temporary):
            setattr(error, each, str(target / Path(name).relative_to(temporary)))


def _take(temporary: Path, target: Path) -> None:
    try:
        os.replace(temporary, target)
    except OSError as error:
        if target.exists():  # which systems tell by several numbers
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        raise


def exchange(one: Path, other: Path) -> bool:
    """Swaps what two names of one disk stand for, at one moment; False where the system or the disk
    cannot, and nothing has changed."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # of Linux
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(here, names[0], here, names[1], swap) == 0
