"""Private: folders whose files are run as code, so that nobody else may have written them.

~/.cache            ours or root's; others may write it only under the sticky bit
  lmwright/         ours, no link, nobody else may write
    compiled/       the same (JAX's cache of compiled programs)
    steps/          the same (the train steps that `plan` compiled)
"""

import os
import stat
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> str | None:
    """Creates a cache folder that only this user can write. Returns why it, or one of the two
    folders above it, cannot be trusted (see `problem`), else None. A folder that cannot be created
    is no problem."""
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        pass
    return problem(folder)


def problem(folder: Path) -> str | None:
    """Reason why what lies in a folder of the cache cannot be trusted; None where it can, or where
    there is no such folder yet."""
    for each in (folder, folder.parent):
        try:
            about = os.lstat(each)
        except OSError:
            continue
        if not stat.S_ISDIR(about.st_mode):
            return f"{each} is a link or a file, not a folder; remove it"
        if about.st_uid != os.getuid():
            return f"{each} belongs to another user; remove it"
        if about.st_mode & OTHERS:
            return f"others may write {each}; remove it, or if only you have, run chmod 700 on it"
    return _root_problem(folder.parent.parent)


def _root_problem(root: Path) -> str | None:
    try:
        about = os.stat(root)
    except OSError:
        return None
    if about.st_uid not in (0, os.getuid()):
        return f"{root} belongs to another user; set XDG_CACHE_HOME to a folder of yours"
    if about.st_mode & OTHERS and not about.st_mode & stat.S_ISVTX:
        return f"others may write {root}; run chmod go-w on it, or set XDG_CACHE_HOME"
    return None


def read_private(path: Path) -> bytes:
    """Content of a file in such a folder. Raises FileNotFoundError, or ValueError if another user
    may have written it: a link, a second name for a file from elsewhere, loose permissions."""
    if trouble := problem(path.parent):
        raise ValueError(trouble)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be opened ({error.strerror})") from error
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
            raise ValueError(f"{path} has several hard links or is not a file")
        if about.st_uid != os.getuid() or about.st_mode & OTHERS:
            raise ValueError(f"other users may write to {path}")
        return file.read()
