"""Files of checkpoints, on a disk or in a bucket: what Orbax does not do with them.

A checkpoint on a disk takes its name when it is whole; in a bucket, where nothing can be renamed
at once, Orbax writes `commit_success.txt` into it last.
"""

import base64
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import xxhash
from etils import epath
from etils.epath import gpath

from lmwright.guard.files import write_whole
from lmwright.storage.bucket import Bucket, Entry
from lmwright.storage.mirror import url_of

DAMAGED = "checkpoints.damaged"
HASHES = "hashes.json"
COMMITTED = "commit_success.txt"
UNFINISHED = ".orbax-checkpoint-tmp"
XXH3, CRC32C = "xxh3", "crc32c"
BLOCK = 1 << 22
REMOVALS = 50

Stamps = dict[str, tuple[Any, ...]]


class ExactPath(gpath.PosixGPath):
    """A folder on a disk as Orbax takes it, whose own name is no pattern: etils takes the `[` and
    `*` of a folder in which it looks for files for one, so that Orbax finds none that it wrote."""

    def glob(self, pattern: str) -> Iterator["ExactPath"]:
        """Yields the paths below it that match, in no order."""
        first, _, rest = pattern.partition("/")
        for path in self.iterdir() if self.is_dir() else ():
            if fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else (path,)


def for_orbax(path: Any) -> Any:
    """`Root.path` as Orbax takes it."""
    return ExactPath(path) if isinstance(path, Path) else path


class StepFiles(Protocol):
    """The files of one checkpoint, by their names relative to it."""

    path: Any
    """`Path` or `epath.Path`."""
    kind: str
    """Kind of the hashes that are written: the one that costs least."""

    def names(self) -> list[str]:
        """Names of all files but hashes.json and hidden ones (a file manager's, NFS's)."""

    def read(self, name: str) -> bytes:
        """Content of a file. Raises FileNotFoundError where there is none."""

    def write(self, name: str, text: str) -> None:
        """Writes a small file, whole or not at all."""

    def fact(self, name: str, kind: str) -> list[Any]:
        """[bytes, hash] of a file: xxh3_64, or `crc32c:` and base64 as buckets keep it."""

    def stamps(self) -> Stamps:
        """Facts that change when a file does: equal ones saw the same files."""


class Root(Protocol):
    """The folder of a run's checkpoints."""

    path: Any

    def make(self) -> None:
        """Makes the folder if necessary."""

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""

    def step(self, step: int) -> StepFiles:
        """The files of a step."""

    def unfinished(self) -> list[StepFiles]:
        """Checkpoints that are being written, or were when their process ended."""

    def remove(self, files: StepFiles) -> None:
        """Removes an unfinished checkpoint."""

    def set_aside(self, step: int) -> None:
        """Moves a checkpoint to `checkpoints.damaged`."""

    def any_aside(self) -> bool:
        """True if there is a checkpoint in `checkpoints.damaged`."""


def root_of(run_dir: Path) -> Root:
    """The checkpoints of a run directory, or of the bucket's folder that it mirrors."""
    url = url_of(run_dir)
    return LocalRoot(run_dir) if url is None else BucketRoot(url)


class LocalFiles:
    """A checkpoint on a disk."""

    kind = XXH3

    def __init__(self, path: Path):
        self.path = path

    def names(self) -> list[str]:
        return [
            path.relative_to(self.path).as_posix()
            for path in sorted(self.path.rglob("*"))
            if path.is_file() and _counts(path.name)
        ]

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text)

    def fact(self, name: str, kind: str) -> list[Any]:
        digest, size = _digest(kind), 0
        with open(self.path / name, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                size += len(block)
        return [size, _text(digest, kind)]

    def stamps(self) -> Stamps:
        stats = {name: (self.path / name).stat() for name in self.names()}
        return {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}


class LocalRoot:
    """checkpoints/ in a run directory."""

    def __init__(self, run_dir: Path):
        self.path = run_dir.absolute() / "checkpoints"

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        try:
            names = [path.name for path in self.path.iterdir() if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return _steps(names)

    def step(self, step: int) -> StepFiles:
        return LocalFiles(self.path / str(step))

    def unfinished(self) -> list[StepFiles]:
        return [LocalFiles(path) for path in self.path.glob(f"*{UNFINISHED}*")]

    def remove(self, files: StepFiles) -> None:
        for left in reversed(range(REMOVALS)):
            try:
                shutil.rmtree(files.path)
            except OSError as error:
                if not left or error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                    raise
            if not files.path.exists():
                return
            time.sleep(0.1)  # a thread of the save that failed may still write there

    def set_aside(self, step: int) -> None:
        aside = self._aside
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / str(step), ignore_errors=True)
        os.replace(self.path / str(step), aside / str(step))

    def any_aside(self) -> bool:
        return self._aside.is_dir() and any(self._aside.iterdir())

    @property
    def _aside(self) -> Path:
        return self.path.with_name(DAMAGED)


class BucketFiles:
    """A checkpoint in a bucket, which keeps a checksum of every object."""

    kind = CRC32C

    def __init__(self, url: str):
        self.path = epath.Path(url)
        self._bucket = Bucket(url)

    def names(self) -> list[str]:
        return sorted(self._entries())

    def read(self, name: str) -> bytes:
        there = self._bucket.read(name)
        if there is None:
            raise FileNotFoundError(2, "No such object", name)
        return there[0]

    def write(self, name: str, text: str) -> None:
        self._bucket.write(name, text)

    def fact(self, name: str, kind: str) -> list[Any]:
        if kind == CRC32C:
            entry = self._listed[name]
            return [entry.size, f"{CRC32C}:{entry.crc32c}"]
        digest = _digest(kind)  # a checkpoint that was copied here from a disk
        data = self.read(name)
        digest.update(data)
        return [len(data), _text(digest, kind)]

    def stamps(self) -> Stamps:
        return {name: (entry.generation,) for name, entry in self._entries().items()}

    def _entries(self) -> dict[str, Entry]:
        return {n: e for n, e in self._bucket.entries().items() if _counts(n.split("/")[-1])}

    @cached_property
    def _listed(self) -> dict[str, Entry]:
        return self._entries()


class BucketRoot:
    """checkpoints/ of a run in a bucket."""

    def __init__(self, url: str):
        self._bucket, self._url = Bucket(url), f"{url}/checkpoints"
        self.path = epath.Path(self._url)

    def make(self) -> None:
        """Does nothing: object stores have no directories."""

    def steps(self) -> list[int]:
        return _steps(self._folders(lambda names: COMMITTED in names))

    def step(self, step: int) -> StepFiles:
        return BucketFiles(f"{self._url}/{step}")

    def unfinished(self) -> list[StepFiles]:
        folders = self._folders(lambda names: COMMITTED not in names)
        return [BucketFiles(f"{self._url}/{name}") for name in folders]

    def remove(self, files: StepFiles) -> None:
        folder = f"checkpoints/{files.path.name}"
        for name in self._bucket.entries(folder):
            self._bucket.remove(name)

    def set_aside(self, step: int) -> None:
        folder = f"checkpoints/{step}"
        self._bucket.remove(f"{folder}/{COMMITTED}")  # first: half a checkpoint is none
        for name in self._bucket.entries(folder):
            self._bucket.move(name, name.replace("checkpoints/", f"{DAMAGED}/", 1))

    def any_aside(self) -> bool:
        return bool(self._bucket.entries(DAMAGED))

    def _folders(self, wanted: Callable[[set[str]], bool]) -> list[str]:
        """Folders by the names of the files right in them."""
        inside: dict[str, set[str]] = {}
        for path in self._bucket.entries("checkpoints"):
            _, folder, *rest = path.split("/")
            if rest:
                inside.setdefault(folder, set()).add("/".join(rest))
        return [folder for folder, names in inside.items() if wanted(names)]


def is_of_service(error: BaseException) -> bool:
    """True for an error of the clients by which Orbax reads buckets, whose data may be whole."""
    room = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or room in ("aiohttp", "gcsfs", "google", "requests")


def _counts(name: str) -> bool:
    return name != HASHES and not name.startswith(".")


def _steps(names: list[str]) -> list[int]:
    return sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))


def _digest(kind: str) -> Any:
    if kind == XXH3:
        return xxhash.xxh3_64()
    import google_crc32c  # comes with the client of buckets, whose checkpoints have these

    return google_crc32c.Checksum()


def _text(digest: Any, kind: str) -> str:
    if kind == XXH3:
        return digest.hexdigest()
    return f"{CRC32C}:{base64.b64encode(digest.digest()).decode()}"
