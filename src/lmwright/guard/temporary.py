"""Temporary folders, of which a killed process leaves none for long: the next one removes it.

$TMPDIR/lmwright-HOST-NAMESPACE-PID-XXXXXXXX
"""

import os
import re
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from lmwright.guard.files import write_whole

DAY = 24 * 3600.0
NAMESPACE = "/proc/self/ns/pid"  # of containers that share a folder, each counts its own processes


def temporary_folder() -> tempfile.TemporaryDirectory:
    """A folder of this process, which goes with the object or the context. Removes those of this
    user's processes of this machine that are gone."""
    mark = _mark()
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).iterdir():
            pid = re.fullmatch(rf"{re.escape(mark)}(\d+)-\w+", path.name)
            if pid and _is_abandoned(path, int(pid[1])):
                shutil.rmtree(path, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"{mark}{os.getpid()}-")


def temporary_file(folder: Path, name: str) -> Path:
    """Path of a file or folder that this process writes beside its place `name`. Removes those in
    the folder that processes of this machine left which are gone, and files of earlier versions
    after a day."""
    mark = _mark()
    with suppress(OSError):
        for path in folder.iterdir():
            known = re.fullmatch(rf"\..+\.(?:{re.escape(mark)})?(\d+)\.tmp", path.name)
            if known is None:
                continue
            old = mark in path.name or time.time() - path.lstat().st_mtime > DAY
            if old and _is_abandoned(path, int(known[1])):
                if mark in path.name and path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
    return folder / f".{name}.{mark}{os.getpid()}.tmp"


def write_output(path: Path, content: str | bytes) -> None:
    """Writes a file as `write_whole` does, into a folder of the user, and removes what killed
    processes left there; elsewhere `remove_leftovers` does."""
    write_whole(path, content, at=temporary_file(path.parent, path.name))


def _mark() -> str:
    """Beginning of the names of all folders of this machine, as its processes are counted here."""
    return f"lmwright-{this_host()}-{namespace()}-"


def this_host() -> str:
    """The machine's name, as part of a file's."""
    return re.sub(r"\W", "_", socket.gethostname())[:40] or "host"


def namespace() -> int:
    """Number of what counts this process: containers of one name count each their own."""
    try:
        return os.stat(NAMESPACE).st_ino
    except OSError:
        return 0


def _is_abandoned(path: Path, pid: int) -> bool:
    try:
        if path.lstat().st_uid != os.getuid() or path.is_symlink():
            return False
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
