"""Sources: the files of a source, split into parts of similar size.

    path --find_files--> File, File, ... --cut_parts--> (Slice, Slice), (Slice,), ...

A path is a file, a folder, a glob, a `save_to_disk` folder, any fsspec URL, or a Hugging Face
dataset. The cut depends on the files alone, never on the number of workers.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from lmwright.config.run import Source
from lmwright.data.json_text import parse_json
from lmwright.data.sources.endings import ENDINGS, PLAIN, split_ending
from lmwright.data.sources.file import (
    File,
    Slice,
    find_matches,
    local_stamp,
    open_binary,
    open_filesystem,
    without_hidden,
)
from lmwright.data.sources.unread import refuse_packed, refuse_unread
from lmwright.errors import UserError, first_line
from lmwright.guard.urls import was_redacted, without_secrets
from lmwright.storage.kaggle import GLOB, Dataset, find_dataset, is_kaggle_name

STAMPS = (
    *("ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "generation"),
    *("mtime", "LastModified", "Last-Modified", "created"),
)
SPLIT_NAME = re.compile(r"(train|training|validation|valid|val|dev|test|testing|eval)[-_.]")
# As TensorFlow Datasets names its files: c4-train.tfrecord-00000-of-01024
RECORD_NAME = re.compile(r".+-(\w+)\.(?:tfrecord|array_record)")
PART_BYTES = 64 << 20
PART_FILES = 4096
NAME_BYTES = 200
READ_BYTES = 1 << 22
# Text is so many times larger than its compressed file, about.
INFLATION = 4


def source_names(sources: Sequence[Source]) -> list[str]:
    """Name of each source: as set, or the last part of its path. Raises UserError if two are
    equal."""
    names: list[str] = []
    for i, source in enumerate(sources):
        last = GLOB.split(source.path.rstrip("/"))[0].rstrip("/").rsplit("/", 1)[-1]
        if last in (".", "..", "~", ""):
            last = _home_path(source.path).resolve().name
        name = source.name or last.lstrip(".").split(".")[0] or f"source{i}"
        unfit = "/" in name or "\\" in name or name.startswith(".") or not name.isprintable()
        if unfit or len(name.encode("utf-8", "replace")) > NAME_BYTES:
            shown = name if len(name) <= 40 else name[:40] + "..."
            raise UserError(
                f"data.sources.{i}.name: {shown!r} cannot be a folder's name; use at most "
                f"{NAME_BYTES} bytes of printable characters without slashes and a leading dot"
            )
        if name in names:
            raise UserError(
                f"data.sources.{i} is called {name!r} like data.sources.{names.index(name)}; "
                f"set data.sources.{i}.name to another"
            )
        names.append(name)
    return names


def find_files(source: Source, exclude: str | os.PathLike | None = None) -> list[File]:
    """Files of a source in a fixed order, without those below the folder `exclude`.

    Raises UserError for a path that is missing or empty, and for an unknown kind of file.
    """
    path = source.path
    if path.startswith("hf://datasets/") and path.removeprefix("hf://").count("/") <= 2:
        from lmwright.data.sources.hub import find_shards

        return find_shards(source)
    if is_kaggle_name(path):
        return _of_kaggle(source)
    if was_redacted(path):
        raise UserError(
            f"data.sources: {path} lacks its credentials, which are never written to a run file; "
            "give the whole URL again, or keep them in fsspec's configuration (docs/prepare.md)"
        )
    files = _remote(source) if "://" in path else _local(source, exclude)
    if not files and exclude and "://" not in path and find_files(source):
        raise UserError(
            f"data.sources: all files of {path} lie in data.dir, {exclude}, and would be taken for "
            "its own; choose another data.dir"
        )
    if not files:
        raise UserError(f"data.sources: {path} matches no file; check the path")
    return files


def _local(source: Source, exclude: str | os.PathLike | None) -> list[File]:
    root = _home_path(source.path)
    if root.is_dir():
        if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
            return _find_saved_to_disk(root, source)
        paths = list(_walk(root, Path(exclude).absolute() if exclude else None))
        return _choose(source, [str(p) for p in paths], str(root) + os.sep)
    if root.is_file():
        return _choose(source, [str(root)], str(root.parent) + os.sep, single=True)
    if root.exists():
        raise UserError(
            f"data.sources: {source.path} is a pipe or a device, which cannot be read twice; save "
            "it as a file"
        )
    if not GLOB.search(source.path):
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", source.path)
        cure = "" if root.is_absolute() else f" in {Path.cwd()}"
        if hub:
            cure += f"; the Hugging Face data set of this name is hf://datasets/{source.path}"
        raise UserError(f"data.sources: {source.path} does not exist{cure}")
    paths, base = find_matches(fsspec.filesystem("file"), str(root.absolute()))
    paths = [p for p in paths if os.path.isfile(p)]
    if exclude:
        paths = [p for p in paths if not Path(p).is_relative_to(Path(exclude).absolute())]
    return _choose(source, paths, base, matched=True)


def _home_path(path: str) -> Path:
    return Path(os.path.expanduser(path))  # without an error for a user that is not there


def _walk(folder: Path, exclude: Path | None) -> Iterator[Path]:
    """Files below a folder, sorted, without hidden files, caches and links to folders."""
    for here, folders, files in os.walk(folder):
        if exclude and Path(here).absolute() == exclude:
            folders.clear()
            continue
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        for name in sorted(files):
            path = Path(here, name)
            if not name.startswith(".") and path.is_file():
                yield path
            elif not name.startswith(".") and path.is_symlink() and not path.exists():
                raise UserError(f"data.sources: {path} is a link to nothing; repair or remove it")


def _remote(source: Source) -> list[File]:
    fs, root = open_filesystem(source.path)
    globbed = bool(GLOB.search(root))
    try:
        if globbed:
            paths, base = find_matches(fs, root)
        elif source.path.startswith(("http://", "https://")) or fs.isfile(root):
            # an http server has no folders to tell from files
            paths = [root]
        else:
            paths = sorted(p for p in fs.find(root) if "/." not in p.removeprefix(root))
    except Exception as e:  # each filesystem raises its own
        raise UserError(f"data.sources: {source.path} cannot be listed: {first_line(e)}") from None
    single = paths == [root]
    if not globbed:
        base = root[: root.rfind("/") + 1] if single else root.rstrip("/") + "/"
    files = _choose(source, paths, base, single=single, matched=globbed, fs=fs)
    return [replace(f, path=fs.unstrip_protocol(f.path)) for f in files]


class _KaggleFiles:
    """Files of a dataset of Kaggle, as `_stamp` asks for them."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def info(self, path: str) -> dict[str, Any]:
        size = self.dataset.files[path.removeprefix(f"{self.dataset.name}/")]
        return {"size": size or None, "ETag": str(self.dataset.version)}


def _of_kaggle(source: Source) -> list[File]:
    try:
        dataset, inner = find_dataset(source.path)
    except UserError as error:
        raise error.at("data.sources") from error
    names = dataset.within(inner)
    if names != [inner]:
        below = inner if GLOB.search(inner) else f"{inner.rstrip('/')}/"
        names = without_hidden(names, below.lstrip("/"))
    if not names:
        raise UserError(f"data.sources: {source.path} matches no file; check the path")
    paths = [f"{dataset.name}/{name}" for name in names]
    files = _KaggleFiles(dataset)
    return _choose(source, paths, f"{dataset.name}/", single=names == [inner], fs=files)


def _choose(
    source: Source, paths: list[str], base: str, *, single: bool = False, matched: bool = False,
    fs: Any = None,
) -> list[File]:  # fmt: skip
    """Files of the requested format; a path that was named or matched must be readable."""
    files, others = [], []
    for path in paths:
        ending, compression = split_ending(path)
        known = next((f for f, endings in ENDINGS.items() if ending in endings), None)
        if source.format == "auto":
            format_ = known
        elif single or matched or known == source.format:
            format_ = source.format
        else:
            plain = source.format == "txt" and ending in PLAIN
            lines = source.format in ("json", "jsonl") and ending == ".json"
            format_ = source.format if plain or lines else None
        if format_ is None:
            others.append(path)
            continue
        size, stamp = _stamp(path, fs)
        name = without_secrets(path).removeprefix(without_secrets(base))
        # ids are text, which the bytes of a file's name on this machine need not be
        name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        files.append(File(path, name, format_, compression, size, stamp))
    if others and (single or not files):
        refuse_unread(source, others, single)
    refuse_packed(source, others)
    return files if single or matched else _one_split(source, files)


def _one_split(source: Source, files: list[File]) -> list[File]:
    """Files of the source's split, where train-*.parquet and test-*.parquet lie side by side."""
    names = [f.name.rsplit("/", 1)[-1] for f in files]
    splits = [SPLIT_NAME.match(name) or RECORD_NAME.match(name) for name in names]
    if not all(splits) or len(there := {m[1] for m in splits if m}) < 2:
        return files
    chosen = [f for f, m in zip(files, splits, strict=True) if m and m[1] == source.split]
    if not chosen:
        raise UserError(
            f"data.sources: {source.path} has the splits {', '.join(sorted(there))}, "
            f"not {source.split!r}; change data.sources.split"
        )
    return chosen


def _stamp(path: str, fs: Any) -> tuple[int | None, str]:
    try:
        if fs is None:
            return local_stamp(path)
        info = fs.info(path)
        stamp = next((str(info[k]) for k in STAMPS if info.get(k)), "")
        return info.get("size"), stamp
    except Exception as e:  # each filesystem raises its own
        # over http, that nothing is there or nobody answers is said by what it comes from
        cause = e.__cause__ if isinstance(e, FileNotFoundError) and e.__cause__ else e
        raise UserError(f"data.sources: {path} cannot be read: {first_line(cause)}") from None


def _find_saved_to_disk(root: Path, source: Source) -> list[File]:
    """Arrow files of a folder that `datasets` wrote with save_to_disk."""
    if (root / "dataset_dict.json").is_file():
        splits = _find_named(root / "dataset_dict.json", "splits", lambda name: name)
        if source.split not in splits:
            raise UserError(
                f"data.sources: {root} has the splits {', '.join(splits)}, not "
                f"{source.split!r}; change data.sources.split"
            )
        root = root / source.split
    files = []
    for name in _find_named(root / "state.json", "_data_files", lambda entry: entry["filename"]):
        path = root / name
        if not path.is_file():
            raise UserError(f"data.sources: {path} is missing; copy the whole folder again")
        files.append(File(str(path), path.name, "arrow", None, *_stamp(str(path), None)))
    return files


def _find_named(path: Path, key: str, of: Callable[[Any], str]) -> list[str]:
    """Names of files or folders that a JSON file beside them lists. Raises UserError for any other
    name."""
    try:
        names = [of(entry) for entry in parse_json(path)[key]]
        if any(not n or n != Path(n).name or "\0" in n for n in names):
            raise ValueError("it names files outside its folder")
        return names
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"data.sources: {path} is damaged ({type(e).__name__}: {e}); copy the folder again"
        ) from None


def cut_parts(
    files: Sequence[File], source: Source, part_bytes: int = PART_BYTES
) -> list[tuple[Slice, ...]]:
    """Slices of about `part_bytes` of text each: large files are split, small ones grouped.

    Compressed and csv files are never cut: where a row begins is known only from the start.
    """
    return group_parts(
        (p for file in files for p in cut_file(file, source, part_bytes)), part_bytes
    )


def group_parts(
    pieces: Iterable[tuple[Slice, int]], part_bytes: int = PART_BYTES
) -> list[tuple[Slice, ...]]:
    """Slices, given with their bytes, in groups of about `part_bytes`; their order stays."""
    parts, group, room = [], [], part_bytes
    for piece, size in pieces:
        if group and (size > room or len(group) >= PART_FILES):
            parts.append(tuple(group))
            group, room = [], part_bytes
        group.append(piece)
        room -= size
    return [*parts, tuple(group)] if group else parts


def cut_file(file: File, source: Source, part_bytes: int) -> Iterator[tuple[Slice, int]]:
    """Slices of a file, each with its bytes of text, about."""
    size = part_bytes if file.size is None else file.size
    by_line = file.format == "jsonl" or (file.format == "txt" and source.documents == "line")
    local = "://" not in file.path
    if size <= 2 * part_bytes:
        yield Slice(file), size * (INFLATION if file.compression else 1)
    elif by_line and local and file.compression is None:
        yield from _cut_lines(file, part_bytes)
    elif file.format == "parquet" and file.compression is None:
        yield from _cut_parquet(file, part_bytes)
    else:
        yield Slice(file), size


def _cut_lines(file: File, part_bytes: int) -> Iterator[tuple[Slice, int]]:
    """Splits after the first line end past each multiple of `part_bytes`; counts lines."""
    start = first_row = lines = at = 0
    with open(file.path, "rb") as f:
        while block := f.read(min(READ_BYTES, part_bytes)):  # so at most one cut in a block
            if at + len(block) - start >= part_bytes:
                end = block.find(b"\n", max(0, start + part_bytes - at))
                if end >= 0:
                    head = lines + block.count(b"\n", 0, end + 1)
                    stop = at + end + 1
                    yield Slice(file, start, stop, first_row), stop - start
                    start, first_row = stop, head
            lines += block.count(b"\n")
            at += len(block)
    if at > start:
        yield Slice(file, start, at, first_row), at - start


def _cut_parquet(file: File, part_bytes: int) -> Iterator[tuple[Slice, int]]:
    try:
        with open_binary(file.path) as f:
            metadata = pq.ParquetFile(f).metadata
    except (pa.ArrowException, OSError) as e:
        raise UserError(f"{file.path} is not a complete parquet file: {first_line(e)}") from None
    for start, stop, first_row, size in cut_row_groups(metadata, part_bytes):
        yield Slice(file, start, stop, first_row), size


def cut_row_groups(metadata: Any, part_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, first row, bytes) of ranges of a parquet file's row groups, each of about
    `part_bytes`, or one group."""
    start = first_row = rows = size = 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        if size and size + group.total_byte_size > part_bytes:
            yield start, i, first_row, size
            start, first_row, size = i, rows, 0
        rows += group.num_rows
        size += group.total_byte_size
    yield start, metadata.num_row_groups, first_row, size
