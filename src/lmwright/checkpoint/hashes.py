"""Hashes of a checkpoint's files: what tells a damaged checkpoint from a whole one.

    checkpoints/<step>/hashes.json   {"state/d/...": [bytes, xxh3_64], ...}

They are written into the folder before Orbax gives it its name, so a checkpoint without them is
damaged. Earlier versions wrote them with the next save: the newest of their checkpoints may have
none (`VERSION` in the meta tells). `_CHECKPOINT_METADATA` is not hashed, since Orbax stamps it
afterwards; nothing of the state is in it.
"""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import xxhash

from lmwright.data.json_text import parse_json
from lmwright.errors import UserError

HASHES = "hashes.json"
META = "meta/metadata"
ORBAX_META = "_CHECKPOINT_METADATA"
VERSION = 2
"""Of a checkpoint whose hashes were written before its commit."""


class Unusable(Exception):
    """A checkpoint cannot be used; the text follows its name: "is damaged: d was altered"."""


def damaged(what: str) -> Unusable:
    """The exception for a file that is not what was saved."""
    return Unusable(f"is damaged: {what}")


def hash_files(folder: Path) -> dict[str, list[Any]]:
    """{relative path: [bytes, xxh3_64]} of all files below, hashes.json left out."""
    hashes = {}
    for path in files(folder):
        digest = xxhash.xxh3_64()
        size = 0
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                size += len(block)
        hashes[path.relative_to(folder).as_posix()] = [size, digest.hexdigest()]
    return hashes


def files(folder: Path) -> list[Path]:
    """All files of a checkpoint but hashes.json and hidden ones (a file manager's, NFS's)."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != HASHES and not path.name.startswith(".")
    ]


def stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of every file: two that are equal saw the same files."""
    hashes = {}
    for path in files(folder):
        stat = path.stat()
        hashes[str(path)] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return hashes


def verify(folder: Path, *, newest: bool) -> bool:
    """True if hashes vouch for the files of a committed checkpoint; they may be missing if it is
    the newest one of an earlier version.

    Raises Unusable for one that is damaged, UserError where this user may not read it.
    """
    try:
        refuse_unlisted(folder)
        return _compare(folder, read_meta(folder), newest)
    except PermissionError as error:
        raise UserError(
            f"{error.filename}: cannot be read ({error.strerror}); let this user read the "
            "checkpoints"
        ) from error
    except FileNotFoundError as error:
        raise damaged(f"{Path(error.filename or folder).name} is missing") from error
    except OSError as error:
        raise damaged(f"it cannot be read ({error.strerror})") from error


def read_meta(folder: Path) -> dict[str, Any]:
    """Metadata saved beside the state: step, data position, the run as TOML."""
    meta = _read_json(folder / META)
    if not isinstance(meta, dict) or meta.get("step") != int(folder.name):
        raise damaged(f"{META} is not that of step {folder.name}")
    return meta


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path)
    except ValueError as error:
        raise damaged(f"{path.name} is not JSON") from error


def refuse_unlisted(folder: Path) -> None:
    """Raises Unusable where Orbax could not list the checkpoint."""
    meta = _read_json(folder / ORBAX_META)
    if not isinstance(meta, dict) or not isinstance(meta.get("commit_timestamp_nsecs"), int):
        raise damaged(f"{ORBAX_META} is not what Orbax wrote")
    names = ocp.path.step.standard_name_format()
    try:
        names.find_step(folder.parent, int(folder.name)).commit_timestamp  # noqa: B018
    except OSError:
        raise
    except Exception as error:
        raise damaged(f"{ORBAX_META} is not what Orbax wrote") from error


def _compare(folder: Path, meta: dict[str, Any], newest: bool) -> bool:
    """True if there are hashes. Raises Unusable if a file differs from them."""
    if not (folder / HASHES).exists() and "version" not in meta and newest:
        return False
    expected = _read_json(folder / HASHES)
    if not isinstance(expected, dict):
        raise damaged(f"{HASHES} holds no hashes")
    hashes = hash_files(folder)
    for name, fact in expected.items():
        if Path(name).name.startswith("."):
            continue  # earlier versions hashed those, too
        if name not in hashes:
            raise damaged(f"{name} is missing")
        if hashes[name] != fact:
            raise damaged(_difference(name, fact, hashes[name][0]))
    for name in hashes:
        if name.startswith(("state/", "meta/")) and name not in expected:
            raise damaged(f"{name} is not in {HASHES}")
    return True


def _difference(name: str, fact: Any, size: int) -> str:
    match fact:
        case [int(expected), str()] if expected != size:
            return f"{name} has {size} bytes instead of {expected}"
        case [int(), str()]:
            return f"{name} was altered"
    return f"{HASHES} holds no hash of {name}"
