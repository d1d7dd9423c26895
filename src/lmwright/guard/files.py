"""Small files that are whole or not there, also after a kill or a power loss."""

import errno
import fcntl
import os
import re
from functools import partial
from pathlib import Path
from typing import IO, Any

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # on a disk, or for a user or a file
# the last two are names of earlier versions
LEFTOVER = re.compile(r"\..+\.\d+\.tmp|\..+\.json\.\d+|metrics\.jsonl\.tmp")


def write_whole(path: Path, content: str | bytes, mode: int = 0o666, *, at: Any = None) -> None:
    """Writes a file beside its place (`at`), and renames it: the place has the old content or the
    new one. Text is UTF-8, `mode` narrowed by the umask. Raises OSError, and leaves nothing."""
    temporary = at or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # a write does not know its file, and the hidden one is of no use to the user
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    sync(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Removes what writers that were killed left in a folder; nobody else may write there."""
    for left in folder.iterdir():
        if LEFTOVER.fullmatch(left.name) and left.is_file():
            left.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes a file's content, or the renames inside a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise
    finally:
        os.close(descriptor)


def try_lock(file: IO[Any]) -> bool:
    """Locks an open file until it is closed; False if another process has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
