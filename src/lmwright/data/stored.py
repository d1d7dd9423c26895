"""Stored: what a prepared `data.dir` holds, from its manifests alone."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from lmwright.data.manifest import MANIFEST, STAGES, parse_manifest
from lmwright.data.portions import PORTIONS, folder_of, parse_portions, refuse_unfinished
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket, is_bucket


@dataclass(frozen=True)
class Stored:
    """The finished stages below a folder or a URL, or below each of its portions."""

    url: str
    manifests: dict[str, bytes]
    """Content of manifest.json by stage."""
    files: dict[str, dict]
    """`bytes` and `xxh3_128` of each file, by its path below the folder."""
    portions: bytes = b""
    """portions.json of a store in portions."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry["bytes"] for entry in self.files.values())

    @property
    def digest(self) -> str:
        """Hash that names the content: 32 hex digits."""
        digest = hashlib.sha256()
        for stage, raw in self.manifests.items():
            digest.update(stage.encode() + b"\0" + raw)
        digest.update(self.portions)
        return digest.hexdigest()[:32]


def read_stored(source: str | os.PathLike) -> Stored:
    """Finished stages below a folder or a URL. Raises UserError where no stage or not every portion
    is finished, or a manifest is damaged."""
    url = os.fspath(source).rstrip("/")
    portions = read_small(url, PORTIONS)
    if portions is not None:
        return _read_portions(url, portions)
    manifests: dict[str, bytes] = {}
    files: dict[str, dict] = {}
    for stage in STAGES:
        raw = read_small(url, f"{stage}/{MANIFEST}")
        if raw is not None:
            manifests[stage] = raw
            entries = parse_manifest(raw, f"{url}/{stage}").files
            files |= {f"{stage}/{name}": entry for name, entry in entries.items()}
    if not manifests:
        raise UserError(f"{url} holds no finished stage; run `lmwright prepare` to make them")
    return Stored(url, manifests, files)


def _read_portions(url: str, raw: bytes) -> Stored:
    told = parse_portions(raw, url)
    refuse_unfinished(told, url, "what is stored for good is stored once")
    manifests: dict[str, bytes] = {}
    files: dict[str, dict] = {}
    for name in map(folder_of, range(told.count)):
        own = read_stored(f"{url}/{name}")
        manifests |= {f"{name}/{stage}": one for stage, one in own.manifests.items()}
        files |= {f"{name}/{file}": entry for file, entry in own.files.items()}
    return Stored(url, manifests, files, raw)


def size_of(url: str, name: str) -> int:
    """Bytes that a file below a folder or the URL of a bucket has, unread; 0 if it is missing."""
    if is_bucket(url):
        there = Bucket(url).entry(name)
        return there.size if there else 0
    try:
        return Path(url, name).stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def read_small(url: str, name: str) -> bytes | None:
    """Bytes of a file below a folder or the URL of a bucket; None if it is missing."""
    if is_bucket(url):
        there = Bucket(url).read(name)
        return there[0] if there else None
    try:
        return Path(url, name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
