"""Shards: fixed-size records in many files, read by number, from a disk or any fsspec URL."""

import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from lmwright.data.manifest import (
    MANIFEST,
    Manifest,
    altered_error,
    check_size,
    file_pieces,
    hash_pieces,
    parse_manifest,
)
from lmwright.data.manifest import read_manifest as read_local_manifest
from lmwright.errors import UserError
from lmwright.guard.temporary import temporary_folder
from lmwright.storage.bucket import is_file_name
from lmwright.storage.patience import Patience, url_filesystem

OPEN_FILES = 256
HASH_PIECE_BYTES = 1 << 24
HASH_THREADS = 8


class LocalPlace:
    """A folder on this machine; records are gathered from memory maps."""

    readers = 1
    """Threads worth having: one computes, more wait for a network together."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._map = functools.lru_cache(OPEN_FILES)(self._open)

    def expect(self, stage: Manifest, files: Sequence[str]) -> None:
        """Hears which files of a stage will be read."""

    def hurry(self, hurried: bool) -> None:
        """Hears whether what does not come at once is needed no more."""

    def name(self, file: str) -> str:
        """Name of a file in messages."""
        return str(self.folder / file)

    def manifest(self, stage: str) -> Manifest:
        """Manifest of a stage's folder."""
        return read_local_manifest(self.folder / stage)

    def size(self, file: str) -> int | None:
        """Size of a file in bytes, which is opened for it, so that one without rights is found;
        None if the file is missing."""
        try:
            with open(self.folder / file, "rb") as f:
                return os.fstat(f.fileno()).st_size
        except FileNotFoundError:
            return None

    def read(self, file: str) -> bytes | None:
        """Bytes of a small file as it is now; None if it is missing."""
        try:
            return (self.folder / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def pieces(self, file: str) -> Iterator[bytes]:
        """Bytes of a file, a few MiB at a time."""
        return file_pieces(self.folder / file)

    def fetch(self, folder: str) -> str:
        """Local path of a small folder; a temporary copy if it lies elsewhere."""
        if not (self.folder / folder).is_dir():
            raise UserError(f"{self.name(folder)} is missing; run `lmwright prepare` to make it")
        return self.name(folder)

    def records(self, file: str, rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Records of one file at ascending row numbers, as opaque items [rows]."""
        return self._map(file, dtype.itemsize)[rows]

    def _open(self, file: str, itemsize: int) -> np.ndarray:
        # opaque items: numpy copies them whole, structured ones field by field
        return np.asarray(np.memmap(self.folder / file, f"V{itemsize}", mode="r"))


class UnmappedPlace(LocalPlace):
    """LocalPlace for a long job: pages of the files never count as this process's memory."""

    def records(self, file: str, rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
        width = dtype.itemsize
        out = np.empty(len(rows), f"V{width}")
        raw = memoryview(out.view(np.uint8))
        first, last = _ranges(rows)
        with open(self.folder / file, "rb", buffering=0) as f:
            for a, b in zip(first.tolist(), (last + 1).tolist(), strict=True):
                f.seek(int(rows[a]) * width)
                if f.readinto(raw[a * width : b * width]) != (b - a) * width:
                    raise UserError(f"{self.name(file)} was truncated while it was read")
        return out


FETCHED: list[tempfile.TemporaryDirectory] = []
"""Folders that were fetched, such as tokenizers; removed when the process ends."""


class RemotePlace:
    """A folder at an fsspec URL; neighboring records are fetched as one range."""

    readers = 4

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.fs, self.root = url_filesystem(self.url)
        self._server = Patience(self.url)

    def expect(self, stage: Manifest, files: Sequence[str]) -> None:
        """Hears which files of a stage will be read."""

    def hurry(self, hurried: bool) -> None:
        """Hears whether what does not come at once is needed no more."""
        self._server.hurried = hurried

    def name(self, file: str) -> str:
        return f"{self.url}/{file}"

    def manifest(self, stage: str) -> Manifest:
        folder = self.name(stage)
        try:
            return parse_manifest(self._bytes(f"{stage}/{MANIFEST}"), folder)
        except FileNotFoundError:
            raise UserError(
                f"{folder}: there is no {MANIFEST}; make the stage with `lmwright prepare` "
                "and copy the whole folder"
            ) from None

    def size(self, file: str) -> int | None:
        try:
            return self._server.ask(lambda: self.fs.size(self._path(file)))
        except FileNotFoundError:
            return None

    def read(self, file: str) -> bytes | None:
        self.fs.invalidate_cache()  # which is shared, and may hold an earlier listing
        try:
            return self._bytes(file)
        except FileNotFoundError:
            return None

    def _bytes(self, file: str) -> bytes:
        return self._server.ask(lambda: self.fs.cat_file(self._path(file)))

    def pieces(self, file: str) -> Iterator[bytes]:
        with (
            self._server.told(),
            self.fs.open(self._path(file), "rb", block_size=HASH_PIECE_BYTES) as f,
        ):
            yield from iter(lambda: f.read(HASH_PIECE_BYTES), b"")

    def fetch(self, folder: str) -> str:
        copy = temporary_folder()
        FETCHED.append(copy)  # the path may outlive this object
        root = self.fs._strip_protocol(self._path(folder)).rstrip("/") + "/"
        found = self._server.ask(lambda: self.fs.find(root))
        paths = [path for path in found if not path.endswith("/")]
        if not paths:
            raise UserError(f"{self.name(folder)} is missing; copy the whole data.dir")
        for path in paths:
            name = path.removeprefix(root)
            if not (path.startswith(root) and is_file_name(name)):  # it would be written elsewhere
                raise UserError(f"{self.name(folder)}: holds {name!r:.99}, which is not in it")
            local = Path(copy.name, folder, name)
            local.parent.mkdir(parents=True, exist_ok=True)
            self._server.ask(partial(self.fs.get_file, path, str(local)))
        return f"{copy.name}/{folder}"

    def records(self, file: str, rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
        width = dtype.itemsize
        first, last = _ranges(rows)
        starts, ends = rows[first] * width, (rows[last] + 1) * width
        paths = [self._path(file)] * len(starts)
        bounds = starts.tolist(), ends.tolist()
        ranges = self._server.ask(lambda: self.fs.cat_ranges(paths, *bounds, on_error="raise"))
        raw = b"".join(ranges)
        if len(raw) != len(rows) * width:
            raise UserError(
                f"{self.name(file)} is shorter than its manifest records; copy it again"
            )
        return np.frombuffer(raw, f"V{width}")

    def _path(self, file: str) -> str:
        return f"{self.root}/{file}"


Place = LocalPlace | RemotePlace
Watched = tuple[Place, str, str]
"""A file of a store: its place, its path below that, and its xxh3_128 (hex)."""


def _ranges(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last index of each run of neighbors among ascending rows."""
    first = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    return first, np.append(first[1:], len(rows)) - 1


def open_place(path: str) -> Place:
    """Place for a local path or a URL that fsspec knows."""
    if "://" not in path:
        return LocalPlace(path)
    if path.startswith("file://"):
        return LocalPlace(path.removeprefix("file://"))
    try:
        return RemotePlace(path)
    except (ImportError, ValueError) as e:
        raise UserError(f"{path}: this kind of URL cannot be read ({e})") from None


class Shards:
    """Rows of several files of a stage, one file after the other.

    max_id: the greatest token id that was written; a row with a greater one is damaged.
    """

    def __init__(
        self, place: Place, stage: Manifest, files: Sequence[str], dtype: np.dtype, max_id: int
    ):
        self.place, self.dtype, self.max_id = place, dtype, max_id
        place.expect(stage, files)
        self.files = [f"{stage.stage}/{file}" for file in files]
        sizes = [stage.files[file]["bytes"] for file in files]
        for file, size in zip(self.files, sizes, strict=True):
            if size % dtype.itemsize:
                raise UserError(f"{place.name(file)} does not hold whole rows; prepare again")
        self.ends = np.cumsum([size // dtype.itemsize for size in sizes], dtype=np.int64)
        self.rows = int(self.ends[-1]) if len(self.ends) else 0

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Records at row numbers int64 [B], in that order. Raises UserError for damaged rows."""
        # ascending reads suit disks, and make ranges for remote files
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        shard = np.searchsorted(self.ends, rows, side="right")
        out = np.empty(len(rows), f"V{self.dtype.itemsize}")
        bounds = np.flatnonzero(np.diff(shard, prepend=-1, append=len(self.ends)))
        for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            number = int(shard[a])
            start = self.ends[number - 1] if number else 0
            records = self.place.records(self.files[number], rows[a:b] - start, self.dtype)
            self._refuse_damage(self.files[number], records.view(self.dtype))
            out[order[a:b]] = records
        return out.view(self.dtype)

    def _refuse_damage(self, file: str, records: np.ndarray) -> None:
        """Raises UserError for ids and lengths that were never written: they would train as NaN."""
        if (worst := records["tokens"].max()) > self.max_id:
            what = f"it holds the token id {worst}, and the greatest written was {self.max_id}"
            raise altered_error(self.place.name(file), what)
        lengths, capacity = records["length"], records["tokens"].shape[1]
        if lengths.min() < 1 or lengths.max() > capacity:
            raise altered_error(
                self.place.name(file), f"a row has no or more than {capacity} tokens"
            )


def check_files(place: Place, manifest: Manifest, files: Sequence[str], hashes: bool) -> None:
    """Raises UserError naming the first file of a stage that is missing, truncated or altered."""

    def check(file: str) -> None:
        entry, path = manifest.files[file], f"{manifest.stage}/{file}"
        check_size(place.name(path), entry["bytes"], place.size(path))
        if hashes and hash_pieces(place.pieces(path)) != entry["xxh3_128"]:
            raise altered_error(place.name(path), "its hash is not the manifest's")

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        for _ in pool.map(check, files):
            pass
