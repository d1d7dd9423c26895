"""Dropped stages: `prepare --keep store` removes the files of a stage that the next one has read.

    normalize/ parquet files --tokenize--> dropped.json (its manifest, sizes of the row groups)

A dropped stage counts as finished for as long as nothing needs its files. A stage that does is told
by a `DroppedError`, and the dropped one is made again.
"""

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lmwright.data.json_text import parse_json
from lmwright.data.manifest import (
    DROPPED,
    MANIFEST,
    Manifest,
    dump_json,
    parse_manifest,
    read_manifest,
)
from lmwright.errors import UserError
from lmwright.guard.files import write_whole

LAST_READ_BY = {"normalize": "tokenize", "tokenize": "pack"}
"""Stages that can be dropped, and the one after which nothing reads their files."""
STAYS = ("stage.json", DROPPED, ".lock", "quarantine.jsonl")


class DroppedError(Exception):
    """A stage needs the files of one that was dropped."""

    def __init__(self, stage: str):
        super().__init__(stage)
        self.stage = stage


def drop(folder: Path) -> None:
    """Removes the files of a finished stage; goes on where it was killed."""
    if read_dropped(folder) is None:
        manifest = read_manifest(folder)
        groups = {n: _row_groups(folder / n) for n in manifest.files if n.endswith(".parquet")}
        whole = (folder / MANIFEST).read_text(encoding="utf-8")
        mode = (folder / MANIFEST).stat().st_mode & 0o777
        write_whole(folder / DROPPED, dump_json({"manifest": whole, "row_groups": groups}), mode)
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in STAYS:
            path.unlink()


def restore(folder: Path) -> None:
    """Lets a dropped stage be made again."""
    (folder / DROPPED).unlink(missing_ok=True)


def read_dropped(folder: Path) -> Manifest | None:
    """Manifest that a dropped stage had; None for another one."""
    body = _read(folder)
    try:
        return None if body is None else parse_manifest(body["manifest"].encode(), str(folder))
    except UserError:
        return None  # a damaged one is made again


def read_made(folder: Path) -> Manifest:
    """Manifest of a finished stage, which may have been dropped. Raises UserError for another."""
    return read_dropped(folder) or read_manifest(folder)


def refuse_dropped(inputs: Mapping[str, Manifest]) -> None:
    """Raises DroppedError where the files of an input are not there."""
    for stage, manifest in inputs.items():
        if read_dropped(Path(manifest.folder)) is not None:
            raise DroppedError(stage)


class Group:
    """Size of a row group, as parquet's metadata has it."""

    def __init__(self, num_rows: int, total_byte_size: int):
        self.num_rows, self.total_byte_size = num_rows, total_byte_size


class RowGroups:
    """Row groups of a file that is gone, as parquet's metadata has them."""

    def __init__(self, sizes: list[list[int]]):
        self._sizes, self.num_row_groups = sizes, len(sizes)

    def row_group(self, i: int) -> Group:
        return Group(*self._sizes[i])


def row_groups(manifest: Manifest, name: str) -> Any:
    """Metadata of the row groups of a stage's parquet file, or what was noted when it was
    dropped."""
    body = _read(Path(manifest.folder))
    if body is not None:
        return RowGroups(body["row_groups"][name])
    with contextlib.closing(pq.ParquetFile(Path(manifest.folder) / name)) as file:
        return file.metadata


def _row_groups(path: Path) -> list[list[int]]:
    with contextlib.closing(pq.ParquetFile(path)) as file:
        groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
        return [[group.num_rows, group.total_byte_size] for group in groups]


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        body = parse_json(folder / DROPPED)
        whole = isinstance(body["manifest"], str) and isinstance(body["row_groups"], dict)
        return body if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
