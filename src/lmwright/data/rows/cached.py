"""Cached: shards of a bucket, copied to this machine's disk while they are read.

    first reads of a shard -----ranges-----> bucket
                 meanwhile  <-- copied whole -- bucket
    later reads -------------> ~/.cache/lmwright/shards/<xxh3_128>

The first step waits for no copy. A copy is named by its hash and compared with it, so stores may
share it and a damaged one is never read. The oldest go when there are more than the limit.
"""

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lmwright.data.manifest import Manifest, file_pieces, hash_file
from lmwright.data.rows.shards import OPEN_FILES, RemotePlace
from lmwright.guard.temporary import temporary_file

GIB = 1 << 30


def cache_folder() -> Path:
    """Folder of the copies: `$XDG_CACHE_HOME/lmwright/shards`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "lmwright", "shards")


class CachedPlace(RemotePlace):
    """A RemotePlace with copies of at most `limit` bytes in `folder`."""

    def __init__(self, url: str, limit: int, folder: Path | None = None):
        super().__init__(url)
        self.limit, self.copies = limit, folder or cache_folder()
        self._entries: dict[str, tuple[str, int]] = {}  # file to hash and bytes
        self._asked: set[str] = set()
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._map = functools.lru_cache(OPEN_FILES)(self._open)

    def expect(self, stage: Manifest, files: Sequence[str]) -> None:
        """All are copied, in order, if there is room for them; otherwise each when it is first
        read."""
        entries = {f"{stage.stage}/{file}": stage.files[file] for file in files}
        self._entries |= {name: (e["xxh3_128"], e["bytes"]) for name, e in entries.items()}
        if sum(size for _, size in self._entries.values()) <= self.limit:
            for name in entries:
                self._ask(name)

    def records(self, file: str, rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
        copy = self._copy(file)
        if copy is not None:
            with contextlib.suppress(OSError):  # removed by another process that needed the room
                return self._map(str(copy), dtype.itemsize)[rows]
        self._ask(file)
        return super().records(file, rows, dtype)

    def pieces(self, file: str) -> Iterator[bytes]:
        copy = self._copy(file)
        return super().pieces(file) if copy is None else file_pieces(copy)

    def _copy(self, file: str) -> Path | None:
        """The copy of a file if it is there, whole."""
        digest, size = self._entries.get(file, ("", 0))
        path = self.copies / digest
        with contextlib.suppress(OSError):
            if digest and path.stat().st_size == size:
                return path
        return None

    def _open(self, path: str, itemsize: int) -> np.ndarray:
        return np.asarray(np.memmap(path, f"V{itemsize}", mode="r"))

    def _ask(self, file: str) -> None:
        if file in self._asked or file not in self._entries:
            return
        self._asked.add(file)
        self._queue.put(file)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shards", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            file = self._queue.get()
            try:
                self._fetch(file)
            except Exception:  # of any file system: the rows are read as ranges, as before
                self._asked.discard(file)

    def _fetch(self, file: str) -> None:
        digest, size = self._entries[file]
        if self._copy(file) is not None or size > self.limit:
            return
        self.copies.mkdir(parents=True, exist_ok=True)
        self._make_room(size)
        temporary = temporary_file(self.copies, digest)
        try:
            self.fs.get_file(self._path(file), str(temporary))
            if hash_file(temporary) == digest:  # else the watch of the hashes will tell
                os.replace(temporary, self.copies / digest)
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Removes the copies that were made first; open maps of them stay valid."""
        copies = sorted(
            (stat.st_mtime_ns, stat.st_size, path)
            for path in self.copies.iterdir()
            if not path.name.startswith(".") and (stat := path.stat())
        )
        total = sum(size for _, size, _ in copies)
        for _, freed, path in copies:
            if total + size <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= freed
            self._asked -= {name for name, (h, _) in self._entries.items() if h == path.name}
