"""One input file: its metadata, and its bytes, decompressed in bounded memory."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import pyarrow as pa
import xxhash

from lmwright.errors import UserError, install
from lmwright.storage.kaggle import GLOB, fetch_file, is_kaggle_name
from lmwright.storage.patience import url_filesystem

CURE = dict.fromkeys(("gs", "gcs"), install("gcs"))  # what else fsspec asks for, it names
READ_BYTES = 1 << 20
DOCUMENT_BYTES = 1 << 30
RECORDS = ("tfrecord", "arrayrecord")
"""Formats that hold records of `tf.train.Example`."""


@dataclass(frozen=True)
class File:
    """One input file (or one shard of a streamed dataset)."""

    path: str
    """Local path or URL."""
    name: str
    """Path below the source; the beginning of document ids."""
    format: str
    """A key of ENDINGS, `arrow` or `hub`."""
    compression: str | None
    size: int | None
    """Bytes, if known."""
    stamp: str
    """Text that changes when the content does."""


@dataclass(frozen=True)
class Slice:
    """Part of a file, or all of it."""

    file: File
    start: int = 0
    """First byte (lines) or row group (parquet)."""
    stop: int | None = None
    first_row: int = 0
    """Lines or rows of the file before the slice."""


def local_stamp(path: str) -> tuple[int, str]:
    """Bytes and stamp of a file on this machine."""
    stat = os.stat(path)
    return stat.st_size, str(stat.st_mtime_ns)


@lru_cache(1 << 16)
def content_stamp(file: File) -> str:
    """A stamp that copies of a file have, too: of one on this machine a hash of its ends, of others
    their own."""
    if not os.path.isfile(file.path):
        return file.stamp
    with open(file.path, "rb") as opened:
        hashed = xxhash.xxh3_128(opened.read(READ_BYTES))
        opened.seek(max(0, (file.size or 0) - READ_BYTES))
        hashed.update(opened.read(READ_BYTES))
    return hashed.hexdigest()


def refuse_changed(file: File) -> None:
    """Raises UserError for a file on this machine that changed since it was listed: one that is
    still being written would be read in part."""
    if "://" in file.path:
        return
    try:
        changed = local_stamp(file.path) != (file.size, file.stamp)
    except OSError:
        changed = True
    if changed:
        raise UserError(
            f"{file.path} changed while it was read; run again when nobody writes to it"
        )


def open_filesystem(url: str) -> tuple[Any, str]:
    """fsspec filesystem of a URL and the path in it. Raises UserError naming a missing package."""
    protocol = url.split("://")[0]
    try:
        return url_filesystem(url)
    except ImportError as e:
        raise UserError(
            f"data.sources: {url} needs another package: {CURE.get(protocol, e)}"
        ) from None
    except ValueError as e:
        raise UserError(f"data.sources: {url}: {e}") from None


def find_matches(fs: Any, pattern: str) -> tuple[list[str], str]:
    """Sorted paths that match a glob, without what is hidden, and the folder below which they
    lie."""
    return without_hidden(sorted(fs.glob(pattern)), pattern), _fixed(pattern)


def without_hidden(paths: Iterable[str], pattern: str) -> list[str]:
    """Paths that match a glob, or are below a folder with a slash at its end, but those with hidden
    names there. They match only a part of the glob that begins with a dot, too."""
    base = _fixed(pattern)
    dotted = [part for part in pattern.removeprefix(base).split("/") if part.startswith(".")]

    def hidden(part: str) -> bool:
        return part.startswith(".") and not any(fnmatchcase(part, each) for each in dotted)

    return [p for p in paths if not any(map(hidden, p.removeprefix(base).split("/")))]


def _fixed(pattern: str) -> str:
    """The folder of a glob below which all its matches lie, with a slash at its end."""
    fixed = GLOB.split(pattern)[0]
    return fixed[: fixed.rfind("/") + 1]


def open_binary(path: str) -> Any:
    """Binary file object of a local path or URL."""
    if is_kaggle_name(path):
        path = str(fetch_file(path))
    if "://" not in path:
        return open(path, "rb")
    fs, root = open_filesystem(path)
    return fs.open(root, "rb")


def stream(file: File, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Blocks of a file's content, decompressed."""
    with open_binary(file.path) as raw, contextlib.ExitStack() as stack:
        stream = raw
        if file.compression:
            # Arrow's, since it refuses a stream that ends early; the zstandard package does not.
            opened = stack.enter_context(pa.PythonFile(raw, mode="r"))
            stream = stack.enter_context(pa.CompressedInputStream(opened, file.compression))
        elif start:
            raw.seek(start)
        left = None if stop is None else stop - start
        while block := stream.read(READ_BYTES if left is None else min(READ_BYTES, left)):
            left = None if left is None else left - len(block)
            yield block
