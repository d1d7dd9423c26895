"""Places of outputs: names that a file system takes, hidden ones for what is not finished, and
what killed processes left there.

.OUT.HOST-PID.tmp   an output being written, which takes its name OUT at the end
.OUT.HOST-PID.old   what an overwritten OUT held, for the moment of the change

HOST also tells containers of one machine apart.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from lmwright.errors import UserError
from lmwright.guard.temporary import namespace, this_host
from lmwright.guard.terminated import terminated_by_exit

HOST = f"{this_host()}_{namespace()}"
MARK = r"(?:(?P<host>\w+)-)?(?P<pid>\d+)(?P<ending>\.tmp|\.old|\.gguf)"
LONGEST = 180  # bytes of a name: file systems take 255, and the hidden one is longer
DAY = 24 * 3600.0


def usable(path: str | os.PathLike) -> Path:
    """The path. Raises UserError for one that no file system takes."""
    path = Path(path)
    text = str(path)
    try:
        longest = max((len(part.encode()) for part in path.parts), default=0)
    except UnicodeEncodeError:
        raise UserError(f"{text!a:.99}: is not text, so it cannot be a path; correct it") from None
    if "\0" in text:
        raise UserError(f"{text!a:.99}: contains a NUL, so it cannot be a path; correct it")
    if longest > 255:
        raise UserError(f"{text[:60]}...: a name of {longest} bytes is too long; shorten it")
    return path


def refuse_pipes(path: Path) -> None:
    """Raises UserError for a pipe or a device in the place of a file, or of one in a folder: who
    opens it waits for ever."""
    for each in path.iterdir() if path.is_dir() else (path,):
        if each.exists() and not (each.is_file() or each.is_dir()):
            raise UserError(f"{each}: is a pipe or a device; put a file in its place, or remove it")


def new_place(out: str | os.PathLike) -> Path:
    """The path of a new output. Raises UserError for one that cannot be written under a hidden
    name first."""
    out = usable(os.path.expanduser(out))
    if len(out.name.encode()) > LONGEST:
        raise UserError(f"{out.name[:60]}...: this name is too long; use {LONGEST} bytes at most")
    return out


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raises UserError for a file that is there and may not be overwritten, and for a folder."""
    if out.is_dir():
        raise UserError(f"{out}: is a folder; name a file in it")
    if os.path.lexists(out) and not overwrite:
        what = "exists" if out.exists() else "is a link to a file that is not there"
        raise UserError(f"{out}: {what}; replace it with --overwrite or choose another name")


@contextmanager
def being_written(out: Path, ending: str) -> Iterator[Path]:
    """Hidden path beside `out` for what is being written, which goes at the end unless it has taken
    its name, also when SIGTERM ends the process. Disk trouble becomes a UserError."""
    temporary = unfinished(out, ending)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        with terminated_by_exit():
            yield temporary
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{out}: cannot be written ({reason}); free some space or choose another folder"
        ) from error
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def unfinished(out: Path, ending: str) -> Path:
    """Temporary path of `out` while it is written. Leftovers of killed processes are removed, or
    restored if one was the only copy of an earlier output."""
    out = out.absolute()
    _clean(out)
    return out.parent / f".{out.name}.{HOST}-{os.getpid()}{ending}"


def _clean(out: Path) -> None:
    mark = re.compile(rf"\.{re.escape(out.name)}\.{MARK}")
    try:
        beside = [(path, mark.fullmatch(path.name)) for path in out.parent.iterdir()]
    except OSError:
        return  # the parent is made later, or whoever writes there says what is wrong
    for path, match in beside:
        if match is None or not _abandoned(path, match["host"], int(match["pid"])):
            continue
        if match["ending"] == ".old" and not out.exists():
            os.replace(path, out)
        else:
            _remove(path)


def _abandoned(path: Path, host: str | None, pid: int) -> bool:
    """True if the process that wrote there is gone. For a process of another host this is a guess,
    after a day."""
    if host in (HOST, None):
        try:
            os.kill(pid, 0)
            return False
        except ProcessLookupError:
            if host is not None:
                return True
        except (PermissionError, OverflowError):
            return False
    try:
        newest = max((p.lstat().st_mtime for p in (path, *path.glob("*"))), default=0.0)
    except OSError:
        return False
    return time.time() - newest > DAY
