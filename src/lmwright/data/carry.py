"""Carry: `prepare` with its output in a bucket.

    gs://bucket/data  --what is there--> mirror on this machine --stages--> mirror --> gs://bucket/data

The stages work in the mirror, as on any disk. Each finished part travels to the bucket behind
them, its files before its marker and a stage's manifest last, so what lies there can always be
taken up, by another machine too. What a stage had there before it was made anew goes first, so
that no part of the old one is taken for one of the new. One machine at a time prepares, which
holds the claim.
"""

import json
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmwright.data.manifest import DROPPED, MANIFEST
from lmwright.errors import UserError
from lmwright.guard.files import write_whole
from lmwright.storage.bucket import Bucket, Entry, is_bucket
from lmwright.storage.claim import Claim
from lmwright.storage.mirror import RUN, mirror_folder, without_others

EVERY_S = 20.0
RECORD = ".carry.json"
STATE = "stage.json"
NOT_SENT = ("tmp",)


@contextmanager
def working_folder(data_dir: str) -> Iterator[str]:
    """The folder in which `data_dir` is prepared: itself, or a local mirror of a bucket, which is
    fetched first and sent back while and after it is worked on."""
    if not is_bucket(data_dir):
        yield data_dir
        return
    carrier = _Carrier(data_dir)
    claim = Claim(carrier.bucket)
    try:
        carrier.fetch()
        carrier.start()
        try:
            yield str(carrier.folder)
        finally:
            carrier.stop()
            claim.confirm()
            carrier.send()
        carrier.remove_left()
    finally:
        claim.close()


class _Carrier:
    """The files of a `data.dir` on both sides."""

    def __init__(self, url: str):
        self.bucket, self.folder = Bucket(url), mirror_folder(url)
        self._there: dict[str, Entry] = {}
        self._record = self.folder / RECORD
        self._same: dict[str, list[int]] = {}
        """Generation there, size and time here, of files that are equal on both sides."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_often, name="carry", daemon=True)

    def fetch(self) -> None:
        """Copies what the bucket has and this machine lacks, markers after their files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError, ValueError):
            self._same = json.loads(self._record.read_bytes())
        self._there = _visible(self.bucket.entries())
        # what was lost there is sent again, but not what was dropped there
        dropped = tuple(n.removesuffix(DROPPED) for n in self._there if n.endswith(f"/{DROPPED}"))
        self._same = {
            name: same
            for name, same in self._same.items()
            if name in self._there or name.startswith(dropped)
        }
        for name in sorted(self._there, key=_order):
            entry, file = self._there[name], self.folder / name
            if not file.exists() or self._same.get(name) != [entry.generation, *_stamp(file)]:
                if _order(name)[0] == 0 and self._is_other(name):
                    shutil.rmtree(file.parent)
                self.bucket.download(name, file)
                self._equal(name, entry)
        self._remember()

    def _is_other(self, state: str) -> bool:
        """True where this machine has files of another making of a stage than the bucket."""
        file, there = self.folder / state, self.bucket.read(state)
        if not file.exists():
            return file.parent.exists()
        return there is None or file.read_bytes() != there[0]

    def _equal(self, name: str, entry: Entry) -> None:
        self._same[name] = [entry.generation, *_stamp(self.folder / name)]

    def _remember(self) -> None:
        write_whole(self._record, json.dumps(self._same))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._closing.set()
        self._thread.join()

    def send(self) -> None:
        """Copies what is new, markers after their files, manifests last."""
        # The files that a marker names are there before it, so markers are listed first.
        markers = [name for name in self._names() if _order(name)[0] > 1]
        files = [name for name in self._names() if _order(name)[0] <= 1]
        for name in sorted(files, key=_order) + sorted(markers, key=_order):
            try:
                if self._same.get(name, [])[1:] != _stamp(self.folder / name):
                    stamp = _stamp(self.folder / name)
                    if _order(name)[0] == 0:
                        self._remove_stage(name)
                    self._there[name] = self.bucket.upload(self.folder / name, name)
                    self._same[name] = [self._there[name].generation, *stamp]
            except FileNotFoundError:
                continue  # of a stage that is made anew
        self._remember()

    def _remove_stage(self, state: str) -> None:
        """Removes what the bucket has of a stage that is made anew: its manifest and markers first,
        its state last."""
        stage = state.removesuffix(STATE)
        old = [name for name in self._there if name.startswith(stage)]
        for name in sorted(old, key=_order, reverse=True):
            self.bucket.remove(name)
            del self._there[name]
            self._same.pop(name, None)

    def _names(self) -> list[str]:
        names = {p.relative_to(self.folder).as_posix(): p for p in self.folder.rglob("*")}
        return [name for name, path in _visible(names).items() if path.is_file()]

    def remove_left(self) -> None:
        """Removes what the bucket has of stages that were made anew."""
        for name in sorted(self._there, key=_order, reverse=True):
            if not (self.folder / name).exists():
                self.bucket.remove(name)

    def _send_often(self) -> None:
        told = False
        while not self._closing.wait(EVERY_S):
            try:
                self.send()
            except (UserError, OSError) as error:
                if not told:
                    warnings.warn(f"{error}; it is tried again", stacklevel=1)
                told = True


def _visible(names: dict) -> dict:
    """Files without hidden ones, those of unfinished parts and those of runs."""
    own = without_others(names.keys(), RUN)
    return {
        name: value
        for name, value in names.items()
        if name in own
        and not any(part.startswith(".") or part in NOT_SENT for part in name.split("/"))
    }


def _order(name: str) -> tuple[int, str]:
    """Key of the order in which files are sent: a stage's state, files, markers, manifest."""
    if name.endswith(f"/{STATE}"):
        return 0, name
    if name.endswith(f"/{MANIFEST}"):
        return 3, name
    return (2 if "/parts/" in name else 1), name


def _stamp(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]
