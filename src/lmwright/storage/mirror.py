"""Mirror: the folder on this machine that stands for a folder of a bucket.

    gs://bucket/run  <-->  ~/.cache/lmwright/buckets/bucket/run/   + .mirror.json

Small files (run.toml, metrics, TensorBoard events, the tokenizer, reports) are read and written
here as in any folder, and travel in both directions. Checkpoints and prepared rows do not: they
are read and written in the bucket itself. Runs and data that lie below a folder have mirrors of
their own, which its mirror leaves alone.
"""

import fcntl
import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from lmwright.errors import StorageError, UserError
from lmwright.guard.files import LEFTOVER, write_whole
from lmwright.guard.temporary import temporary_folder
from lmwright.storage.bucket import SCHEME, Bucket, Entry, is_bucket

RECORD = ".mirror.json"
LOCK = ".lock"
APART = ("checkpoints", "checkpoints.damaged")
FILES = (".toml", ".gguf", ".html", ".json")
CONFIGS = ("config.json", "adapter_config.json")
RUN, STAGE = "run.toml", "stage.json"  # in a run directory, and in a stage of prepared data
PUSH_EVERY_S = 30.0

Stamp = list[int]


def mirror_folder(path: str | os.PathLike) -> Path:
    """The local folder of a path: its mirror for the URL of a bucket, else the path itself.
    Nothing is read or made."""
    if not is_bucket(path):
        return Path(path)
    parts = os.fspath(path).removeprefix(SCHEME).strip("/").split("/")
    if ".." in parts or "" in parts:
        raise UserError(f"{path}: has an empty name or '..' in it; write gs://BUCKET/FOLDER")
    return _mirrors().joinpath(*parts)


def _mirrors() -> Path:
    """The folder of all mirrors of this user."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "lmwright", "buckets")


def fetched(path: str | os.PathLike) -> Path:
    """The local path of a folder or of a file (by its ending), brought up to date if it lies in a
    bucket. Large files of checkpoints are left there."""
    if not is_bucket(path):
        return Path(path)
    url = os.fspath(path).rstrip("/")
    if match := re.fullmatch(r"(.+)/checkpoints/(\d+)", url):
        return fetched(match[1]) / "checkpoints" / match[2]
    folder, _, name = url.rpartition("/")
    if name == "run.toml":
        return fetched(folder) / name
    local = mirror_folder(url)
    if local.suffix in FILES:
        _fetch_file(Bucket(folder), name, local)
    else:
        Mirror(url, local).refresh()
    return local


def _fetch_file(bucket: Bucket, name: str, file: Path) -> None:
    there = bucket.entry(name)
    if there is None:
        file.unlink(missing_ok=True)  # whoever opens it says that it is missing
        return
    mark = file.with_name(f".{file.name}.generation")
    if not (file.exists() and mark.exists() and mark.read_text() == str(there.generation)):
        bucket.download(name, file)
        write_whole(mark, str(there.generation))


@contextmanager
def sending(out: str | os.PathLike, *, overwrite: bool | None = None) -> Iterator[Path]:
    """A place on this machine for an output, which is sent to its bucket at the end if it has one.
    `overwrite` is None for verbs that have no such option. Raises UserError if something is there
    that may not be overwritten, and for another URL."""
    if not is_bucket(out):
        refuse_url(out, " or gs://BUCKET/NAME")
        yield Path(out)
        return
    url = os.fspath(out).rstrip("/")
    bucket = Bucket(url.rpartition("/")[0])
    name = url.rpartition("/")[2]
    before = set(bucket.entries(name)) | ({name} if bucket.entry(name) else set())
    begun = name not in before and not any(map(_says_whole, before))  # by a command that was killed
    cure = "remove it" if overwrite is None else "add --overwrite"
    there = UserError(f"{out}: is there already; choose another place, or {cure}")
    if before and not (overwrite or begun):
        raise there
    with temporary_folder() as folder:
        yield Path(folder, name)
        files = {p.relative_to(folder).as_posix(): p for p in Path(folder).rglob("*")}
        files = {sent: path for sent, path in files.items() if path.is_file()}
        if not (overwrite or before <= files.keys()):  # what lies there is something else
            raise there
        _send(bucket, files, before)


def refuse_url(out: str | os.PathLike, other: str = "") -> None:
    """Raises UserError for a URL, which would be taken for a folder `gs:` here; `other` names what
    could be given beside a path."""
    if re.match(r"[a-z][a-z\d+.-]+:/", os.fspath(out)):
        raise UserError(f"{out}: cannot be written to; give a path of this machine{other}")


def _says_whole(name: str) -> bool:
    """True for the file that is sent last: without it there is no model."""
    return PurePosixPath(name).name in CONFIGS and name.count("/") == 1


def _send(bucket: Bucket, files: Mapping[str, Path], before: AbstractSet[str]) -> None:
    """Sends files in the place of those that were there before. At no moment does what lies there
    look like a model and is half of one, or half another."""
    for name in filter(_says_whole, before):
        bucket.remove(name)
    try:
        for name in sorted(files, key=lambda name: (_says_whole(name), name)):
            bucket.upload(files[name], name)
    except BaseException as error:
        if not before and not isinstance(error, StorageError):  # then removing would fail as well
            with suppress(UserError):
                for name in files:
                    bucket.remove(name)
        raise
    for left in before - files.keys():
        bucket.remove(left)


def place_in(folder: str | os.PathLike, name: str) -> str:
    """Path or URL of a name in a folder."""
    return f"{os.fspath(folder).rstrip('/')}/{name}"


def send_file(file: Path, out: str | os.PathLike) -> None:
    """Copies a file to its place in a bucket, if that is where it belongs."""
    if is_bucket(out):
        folder, _, name = os.fspath(out).rpartition("/")
        Bucket(folder).upload(file, name)


def shown(path: Path) -> str:
    """The place that a local folder, or a file in a mirror, stands for, for messages."""
    if path.is_relative_to(_mirrors()):
        return SCHEME + path.relative_to(_mirrors()).as_posix()
    return url_of(path) or str(path)


def url_of(folder: Path) -> str | None:
    """The URL that a folder mirrors; None for a folder that is no mirror."""
    url = _record(folder).get("url")
    return url if isinstance(url, str) and is_bucket(url) else None


class Mirror:
    """The small files of a folder of a bucket, and their copies in `folder`."""

    def __init__(
        self, url: str, folder: Path | None = None, *, check: Callable[[], None] = lambda: None
    ):
        """Opens the mirror of a folder. `check` raises where nothing may be pushed."""
        self.url = url.rstrip("/")
        self.folder = mirror_folder(url) if folder is None else folder
        self.bucket = Bucket(self.url)
        self._check = check
        self._pushing = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned = False

    def begin(self) -> None:
        """Makes the folder, which then says what it mirrors. Raises UserError if it cannot be."""
        try:
            self._keep(_files(self.folder))
        except OSError as error:
            raise UserError(
                f"{self.folder}: cannot be written ({error.strerror}); free some space, or set "
                "XDG_CACHE_HOME to a folder of yours"
            ) from error

    def refresh(self) -> None:
        """Pulls as `pull` does, unless a process of this machine trains there: its files are
        newer. Others may refresh the folder at the same time."""
        self.begin()
        lock = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return
        else:
            self.pull()
        finally:
            os.close(lock)

    def pull(self) -> None:
        """Makes the folder equal to the bucket. A file that was changed here since the bucket's
        version was pushed or pulled is newer, and stays."""
        record, there = _files(self.folder), self.bucket.entries(apart=APART)
        here = _local_names(self.folder)
        if all("/" in name for name in there):  # no run and no model
            there = {}
        own = without_others({*there, *here}, RUN, STAGE)
        entries = {n: e for n, e in there.items() if n in own and not _is_hidden(n)}
        for name in here & own - entries.keys():
            (self.folder / name).unlink(missing_ok=True)
        for name, entry in entries.items():
            known = record.get(name)
            if known and known["generation"] == entry.generation and _stamp(self.folder / name):
                continue
            self.bucket.download(name, self.folder / name)
            record[name] = _fact(entry, self.folder / name)
        self._keep({name: record[name] for name in entries})

    def push(self) -> None:
        """Copies the files that changed here since they were pushed or pulled."""
        with self._pushing:
            self._check()
            record = _files(self.folder)
            for name in sorted(without_others(_local_names(self.folder), RUN, STAGE)):
                file = self.folder / name
                stamp = _stamp(file)
                if stamp is None or record.get(name, {}).get("stamp") == stamp:
                    continue
                try:
                    data = file.read_bytes()
                except FileNotFoundError:
                    continue  # a temporary name that is gone
                entry = self.bucket.write(name, data)
                record[name] = {"generation": entry.generation, "stamp": stamp}
                self._keep(record)

    def push_behind(self) -> None:
        """Pushes every `PUSH_EVERY_S` in a thread, until `close`."""
        self._thread = threading.Thread(target=self._push_often, name="mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and pushes what is left. Raises UserError where that fails."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.push()

    def _push_often(self) -> None:
        while not self._closing.wait(PUSH_EVERY_S):
            try:
                self.push()
                self._warned = False
            except (UserError, OSError) as error:
                if not self._warned:
                    warnings.warn(f"{error}; it is tried again", stacklevel=1)
                self._warned = True

    def _keep(self, files: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / RECORD, json.dumps({"url": self.url, "files": files}))


def _record(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads((folder / RECORD).read_bytes())
        if isinstance(record, dict):
            return record
    return {}


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    files = _record(folder).get("files")
    return files if isinstance(files, dict) else {}


def _local_names(folder: Path) -> set[str]:
    names = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not _is_hidden(name) and name.split("/")[0] not in APART:
            names.add(name)
    return names


def without_others(names: AbstractSet[str], *marks: str) -> set[str]:
    """Those names of files below a folder that are its own: not those in a folder below it that has
    a file of a name in `marks`, and no checkpoints of these."""
    others = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] in marks}
    others -= {"", "tokenizer"}  # a run has a copy of that stage

    def is_own(name: str) -> bool:
        above = {str(folder) for folder in PurePosixPath(name).parents}
        return others.isdisjoint(above) and not any(f"/{each}/" in name for each in APART)

    return set(filter(is_own, names))


def _is_hidden(name: str) -> bool:
    last = name.rsplit("/", 1)[-1]
    return any(part.startswith(".") for part in name.split("/")) or bool(LEFTOVER.fullmatch(last))


def _fact(entry: Entry, file: Path) -> dict[str, Any]:
    return {"generation": entry.generation, "stamp": _stamp(file)}


def _stamp(file: Path) -> Stamp | None:
    """Stamp of a file, which changes when the file does; None where there is none."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns]
