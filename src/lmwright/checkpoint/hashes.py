"""Hashes of a checkpoint's files: what tells a damaged checkpoint from a whole one.

    checkpoints/<step>/hashes.json   {"state/d/...": [bytes, xxh3_64], ...}

In a bucket they are the checksums that the service keeps (`crc32c:...`), so that comparing them is
one listing; a run that was copied from one to the other is compared by the hashes it has.

They are written before Orbax commits the checkpoint, so a checkpoint without them is
damaged. Earlier versions wrote them with the next save: the newest of their checkpoints may have
none (`VERSION` in the meta tells). `_CHECKPOINT_METADATA` is not hashed, since Orbax stamps it
afterwards; nothing of the state is in it.
"""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from lmwright.checkpoint.files import CRC32C, HASHES, XXH3, BucketFiles, StepFiles, is_of_service
from lmwright.data.json_text import parse_text
from lmwright.errors import StorageError, UserError, first_line

META = "meta/metadata"
ORBAX_META = "_CHECKPOINT_METADATA"
VERSION = 2
"""Version of a checkpoint whose hashes were written before its commit."""


class Unusable(Exception):
    """A checkpoint cannot be used; the text follows its name: "is damaged: d was altered"."""


def damaged(what: str) -> Unusable:
    """The exception for a file that is not what was saved."""
    return Unusable(f"is damaged: {what}")


def hash_files(files: StepFiles) -> dict[str, list[Any]]:
    """{name: [bytes, hash]} of all files that are vouched for."""
    return {name: files.fact(name, files.kind) for name in files.names() if name != ORBAX_META}


def verify(files: StepFiles, *, newest: bool) -> bool:
    """True if hashes vouch for the files of a committed checkpoint; they may be missing if it is
    the newest one of an earlier version.

    Raises Unusable for one that is damaged, UserError where this user may not read it.
    """
    try:
        refuse_unlisted(files)
        return _compare(files, read_meta(files), newest)
    except PermissionError as error:
        raise UserError(
            f"{error.filename}: cannot be read ({error.strerror}); let this user read the "
            "checkpoints"
        ) from error
    except FileNotFoundError as error:
        raise damaged(f"{Path(error.filename or files.path).name} is missing") from error
    except OSError as error:
        raise damaged(f"it cannot be read ({error.strerror})") from error


def read_meta(files: StepFiles) -> dict[str, Any]:
    """Metadata saved beside the state: step, data position, the run as TOML."""
    meta, step = _read_json(files, META), files.path.name
    if not isinstance(meta, dict) or meta.get("step") != int(step):
        raise damaged(f"{META} is not that of step {step}")
    return meta


def _read_json(files: StepFiles, name: str) -> Any:
    try:
        return parse_text(files.read(name).decode("utf-8"))
    except ValueError as error:
        raise damaged(f"{name.split('/')[-1]} is not JSON") from error


def refuse_unlisted(files: StepFiles) -> None:
    """Raises Unusable where Orbax could not list the checkpoint."""
    meta = _read_json(files, ORBAX_META)
    if not isinstance(meta, dict) or not isinstance(meta.get("commit_timestamp_nsecs"), int):
        raise damaged(f"{ORBAX_META} is not what Orbax wrote")
    names = ocp.path.step.standard_name_format()
    try:
        names.find_step(files.path.parent, int(files.path.name)).commit_timestamp  # noqa: B018
    except Exception as error:
        if isinstance(files, BucketFiles) and is_of_service(error):
            raise StorageError(
                f"{files.path}: cannot be read ({first_line(error):.200}); try again"
            ) from error
        if isinstance(error, OSError):
            raise
        raise damaged(f"{ORBAX_META} is not what Orbax wrote") from error


def _compare(files: StepFiles, meta: dict[str, Any], newest: bool) -> bool:
    """True if there are hashes. Raises Unusable if a file differs from them."""
    try:
        expected = _read_json(files, HASHES)
    except FileNotFoundError:
        if "version" not in meta and newest:
            return False
        raise
    if not isinstance(expected, dict):
        raise damaged(f"{HASHES} holds no hashes")
    names = set(files.names())
    for name, fact in expected.items():
        if Path(name).name.startswith("."):
            continue  # earlier versions hashed those, too
        if name not in names:
            raise damaged(f"{name} is missing")
        actual = files.fact(name, _kind(fact))
        if actual != fact:
            raise damaged(_difference(name, fact, actual[0]))
    for name in names:
        if name.startswith(("state/", "meta/")) and name not in expected:
            raise damaged(f"{name} is not in {HASHES}")
    return True


def _kind(fact: Any) -> str:
    text = fact[1] if isinstance(fact, list) and len(fact) == 2 else ""
    return CRC32C if str(text).startswith(CRC32C) else XXH3


def _difference(name: str, fact: Any, size: int) -> str:
    match fact:
        case [int(expected), str()] if expected != size:
            return f"{name} has {size} bytes instead of {expected}"
        case [int(), str()]:
            return f"{name} was altered"
    return f"{HASHES} holds no hash of {name}"
