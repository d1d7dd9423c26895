"""Manifest: what a finished stage wrote, with sizes and hashes; and files written atomically.

<stage>/stage.json      what is being built (fingerprint); there from the first moment
<stage>/parts/*.json    one marker for each finished part
<stage>/manifest.json   there only when every part is: counts, files, facts
"""

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lmwright.errors import UserError

MANIFEST = "manifest.json"
DROPPED = "dropped.json"
FORMAT = 1
PARTS = ("stage", "fingerprint", "counts", "facts", "files", "versions")
SELF = "xxh3_128"
READ_BYTES = 1 << 22

STAGES = ("normalize", "tokenizer", "tokenize", "pack", "shuffle")


@dataclass(frozen=True)
class Manifest:
    """A finished stage. `counts` are summed over its parts; `facts` hold for the whole stage."""

    stage: str
    fingerprint: dict[str, Any] = field(repr=False)
    counts: dict[str, Any]
    facts: dict[str, Any] = field(repr=False)
    files: dict[str, dict[str, Any]] = field(repr=False)
    """Path relative to the stage's folder -> `bytes` and `xxh3_128` (hex)."""
    versions: dict[str, Any] = field(repr=False)
    hash: str = field(default="", repr=False)
    """xxh3_128 of manifest.json itself; names the state of the whole stage."""
    folder: str = field(default="", compare=False)

    def total(self, key: str) -> float:
        """Sum of every count called `key`, at any depth."""
        return total(self.counts, key)

    def check_sizes(self) -> None:
        """Raises UserError naming the first file that is missing or has another size than
        recorded."""
        for name, entry in self.files.items():
            path = Path(self.folder) / name
            have = path.stat().st_size if path.exists() else None
            check_size(str(path), entry["bytes"], have)

    def to_json(self) -> bytes:
        body = {name: getattr(self, name) for name in PARTS}
        return dump_json(body | {SELF: digest(dump_json(body))})


def parse_manifest(raw: bytes, folder: str) -> Manifest:
    """Manifest from the bytes of `<folder>/manifest.json`; UserError if they are not one."""
    try:
        body = json.loads(raw)
        _check_whole(body)
        if body["versions"]["format"] != FORMAT:
            raise UserError(
                f"{folder}/{MANIFEST}: format {body['versions']['format']} is not the format "
                f"{FORMAT} of this lmwright; remove the folder and prepare again"
            )
        return Manifest(**{n: body[n] for n in PARTS}, hash=digest(raw), folder=folder)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(
            f"{folder}/{MANIFEST} is damaged ({e}); remove the folder and prepare again"
        ) from None


def _check_whole(body: Any) -> None:
    """Raises ValueError unless a manifest has all its parts, of their types, as they were
    written."""
    kinds = dict.fromkeys(PARTS, dict) | {"stage": str}
    for name, kind in kinds.items():
        if not isinstance(body[name], kind):
            raise ValueError(f"{name} has an unexpected value")
    for name, entry in body["files"].items():
        outside = name.startswith("/") or ".." in name.split("/") or "\0" in name
        if outside or not isinstance(entry["xxh3_128"], str) or type(entry["bytes"]) is not int:
            raise ValueError(f"files: {name!r} has no size and hash, or is outside")
    # manifests of earlier versions have no hash of themselves
    if SELF in body and body[SELF] != digest(dump_json({name: body[name] for name in PARTS})):
        raise ValueError("its hash differs")


def read_manifest(folder: str | os.PathLike) -> Manifest:
    """Manifest of a finished stage in a local folder; UserError if the stage is not finished."""
    path = Path(folder) / MANIFEST
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if (path.parent / DROPPED).exists():
            raise UserError(
                f"{path.parent}: this stage was dropped by `prepare --keep store`; remove the "
                "folder and run `lmwright prepare` to make it again"
            ) from None
        unfinished = (path.parent / "stage.json").exists()
        what = "was interrupted" if unfinished else "has not been made"
        relative = not path.is_absolute() and not path.parent.parent.exists()
        where = f" in {Path.cwd()}" if relative else ""
        raise UserError(
            f"{path.parent}: this stage {what}{where}; run `lmwright prepare` to make it"
            + (", or go to the folder where it is" if relative else "")
        ) from None
    return parse_manifest(raw, str(path.parent))


def check_size(path: str, wanted: int, have: int | None) -> None:
    """Raises UserError naming the file if its size is not the expected one (None: the file is
    missing)."""
    if have == wanted:
        return
    state = "is missing" if have is None else f"has {have:,} bytes instead of {wanted:,}"
    raise UserError(f"{path} {state}; run `lmwright prepare` again or copy the file again")


def altered_error(path: str, what: str) -> UserError:
    """UserError for a file of the right size with other bytes in it; `what` says how this was
    detected."""
    return UserError(
        f"{path} was altered: {what}; delete this file and run `lmwright prepare` again, or copy "
        "it again"
    )


def refuse_altered(path: str | os.PathLike, wanted: str) -> None:
    """Raises UserError unless a file has the hash that its manifest records."""
    if hash_file(path) != wanted:
        raise altered_error(os.fspath(path), "its hash is not the manifest's")


def total(counts: Any, key: str) -> float:
    """Sum of every number stored under `key` in nested dicts."""
    if not isinstance(counts, Mapping):
        return 0
    own = counts.get(key, 0)
    own = own if isinstance(own, int | float) else 0
    return own + sum(total(v, key) for v in counts.values())


def add_counts(a: Any, b: Any) -> Any:
    """Sum of the counts of two parts: numbers add, dicts merge, lists are concatenated.

    Of numbers under a key that begins with `max_` the larger one stays.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        both = a.keys() & b.keys()
        return {**a, **b, **{k: _join(k, a[k], b[k]) for k in both}}
    return a + b


def _join(key: str, a: Any, b: Any) -> Any:
    return max(a, b) if key.startswith("max_") else add_counts(a, b)


def digest(raw: bytes) -> str:
    """xxh3_128 of bytes, hex."""
    return xxhash.xxh3_128_hexdigest(raw)


def hash_file(path: str | os.PathLike) -> str:
    """xxh3_128 of a file, hex; reads it in pieces."""
    return hash_pieces(file_pieces(path))


def hash_pieces(pieces: Iterable[bytes]) -> str:
    """xxh3_128 of bytes that come in pieces, hex."""
    h = xxhash.xxh3_128()
    for piece in pieces:
        h.update(piece)
    return h.hexdigest()


def file_pieces(path: str | os.PathLike) -> Iterator[bytes]:
    """Bytes of a file in pieces of `READ_BYTES`."""
    with open(path, "rb") as f:
        yield from iter(lambda: f.read(READ_BYTES), b"")


def dump_json(body: Any) -> bytes:
    """Canonical JSON for files that are compared byte by byte; accepts numpy scalars."""
    text = json.dumps(body, indent=1, sort_keys=True, default=lambda number: number.item())
    return (text + "\n").encode()


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes a .npy file; a full disk is an OSError with its errno, which numpy's own writer
    lacks."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    # a view of the buffer in the error's traceback would crash the collector of Python 3.12.1
    path.write_bytes(buffer.getvalue())


def files_below(folder: Path) -> Iterator[Path]:
    """Files below a folder in sorted order."""
    return (p for p in sorted(folder.rglob("*")) if p.is_file())
