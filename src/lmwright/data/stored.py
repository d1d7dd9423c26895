"""Stored: what a prepared `data.dir` holds, from its manifests alone."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from lmwright.data.manifest import MANIFEST, STAGES, parse_manifest
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket, is_bucket


@dataclass(frozen=True)
class Stored:
    """The finished stages below a folder or a URL."""

    url: str
    manifests: dict[str, bytes]
    """Content of manifest.json by stage."""
    files: dict[str, dict]
    """`bytes` and `xxh3_128` of each file, by its path below the folder."""

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
        return digest.hexdigest()[:32]


def read_stored(source: str | os.PathLike) -> Stored:
    """The finished stages below a folder or a URL. Raises UserError where no stage is finished, or
    a manifest is damaged."""
    url = os.fspath(source).rstrip("/")
    manifests: dict[str, bytes] = {}
    files: dict[str, dict] = {}
    for stage in STAGES:
        raw = _read(url, f"{stage}/{MANIFEST}")
        if raw is not None:
            manifests[stage] = raw
            entries = parse_manifest(raw, f"{url}/{stage}").files
            files |= {f"{stage}/{name}": entry for name, entry in entries.items()}
    if not manifests:
        raise UserError(f"{url} holds no finished stage; run `lmwright prepare` to make them")
    return Stored(url, manifests, files)


def _read(url: str, name: str) -> bytes | None:
    if is_bucket(url):
        there = Bucket(url).read(name)
        return there[0] if there else None
    try:
        return Path(url, name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
