"""Cache: what the TPU compiler said of a program, kept so that it is asked once.

    ~/.cache/lmwright/plans/KEY/  answer.json, step.hlo.zst

The key is a hash of the program before compilation (`program.text`), the slice, the compiler's
options and the versions of JAX and the compiler: another program, or another compiler, is
another entry.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import zstandard

from lmwright.data.json_text import parse_json
from lmwright.guard.private import make_private
from lmwright.program.text import fingerprint

FORMAT = 2  # of the answer
DAY_S = 24 * 3600.0
ENTRIES = 200  # some 100 KB each; the oldest go
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


def cache_folder() -> Path:
    """Folder of the entries: `$XDG_CACHE_HOME/lmwright/plans`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "lmwright", "plans")


def key_of(program: str, slice_name: str, options: dict[str, str]) -> str:
    """The name of an entry."""
    versions = {name: _version(name) for name in PACKAGES}
    told = json.dumps([FORMAT, fingerprint(program), slice_name, options, versions], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def load(key: str) -> tuple[dict[str, Any], str] | None:
    """The answer and the compiled program's text; None where there is no whole entry."""
    folder = cache_folder() / key
    try:
        answer = parse_json(folder / "answer.json")
        packed = folder.joinpath("step.hlo.zst").read_bytes()
        return answer, zstandard.decompress(packed).decode()
    except (OSError, ValueError, zstandard.ZstdError):
        return None


def save(key: str, answer: dict[str, Any], hlo: str) -> None:
    """Keeps an answer; an entry is there whole or not at all. A folder that cannot be
    written to is no error."""
    home = cache_folder()
    try:
        make_private(home)
        with tempfile.TemporaryDirectory(dir=home, prefix=".") as temp:
            entry = Path(temp, key)
            entry.mkdir()
            entry.joinpath("answer.json").write_text(json.dumps(answer))
            entry.joinpath("step.hlo.zst").write_bytes(zstandard.compress(hlo.encode()))
            shutil.rmtree(home / key, ignore_errors=True)
            os.rename(entry, home / key)
        entries = sorted(home.glob("[0-9a-f]*"), key=lambda entry: entry.stat().st_mtime)
        killed = [left for left in home.glob(".*") if time.time() - left.stat().st_mtime > DAY_S]
        for entry in (*entries[:-ENTRIES], *killed):
            shutil.rmtree(entry, ignore_errors=True)
    except OSError:
        return
