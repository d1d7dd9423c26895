"""Tokenizers by hub name: `hf://owner/name[@revision]`, or the name alone where no such file lies
here.

Only the files of the tokenizer are fetched.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lmwright.config.run import Tokenizer
from lmwright.data.manifest import read_manifest
from lmwright.errors import UserError
from lmwright.storage.hub import PREFIX, Held, fetch_files, is_hub_name

ALONE = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json",
    "vocab.txt", "*.tiktoken",
)  # fmt: skip
BESIDE = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "merges.txt",
)  # fmt: skip
PLAIN = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")
FILE_ENDS = (".json", ".model", ".tiktoken", ".txt")


def on_hub(path: str | os.PathLike) -> bool:
    """True if a path names a tokenizer of the hub: with `hf://`, or as `owner/name` where no file
    or folder of this name exists."""
    if is_hub_name(path):
        return True
    plain = PLAIN.fullmatch(str(path)) and not str(path).endswith(FILE_ENDS)
    return bool(plain) and not Path(path).exists()


_FOUND: ContextVar[dict[str, tuple[Path, str]] | None] = ContextVar("_FOUND", default=None)


@contextmanager
def asked_once() -> Iterator[None]:
    """Within it, the hub is asked for each name once, and a name stands for one commit."""
    token = _FOUND.set({})
    try:
        yield
    finally:
        _FOUND.reset(token)


def local_tokenizer(path: str | os.PathLike) -> tuple[Path, str]:
    """(local file or folder, `hf://owner/name@commit` if it was fetched) of a tokenizer's path.

    Raises UserError for a hub name under which there is no tokenizer, or none that may be read, and
    for a URL.
    """
    if not on_hub(path):
        if "://" in str(path):
            raise UserError(
                f"{path}: tokenizers are not read from a URL; copy its files to a folder here, or "
                f"write {PREFIX}owner/name"
            )
        return Path(path).expanduser(), ""
    found = _FOUND.get()
    if found is None:
        return _from_hub(path)
    if str(path) not in found:
        found[str(path)] = _from_hub(path)
    return found[str(path)]


def _from_hub(path: str | os.PathLike) -> tuple[Path, str]:
    repo, _, revision = str(path).removeprefix(PREFIX).partition("@")
    if not PLAIN.fullmatch(repo):
        raise UserError(
            f"{path}: is not the name of a tokenizer; write hf://owner/name or "
            f"hf://owner/name@revision"
        )
    name = str(path)
    if not is_hub_name(path):
        name += " (no file or folder here, so a name on the hub)"
    at, commit = fetch_files(
        name, repo, revision or None, _choose, known_by=ALONE[:-1], what="repository"
    )
    return at, f"{PREFIX}{repo}@{commit}"


def _choose(held: Held) -> list[str]:
    def named(patterns: tuple[str, ...]) -> list[str]:
        return sorted(f for f in held.files if any(fnmatch(f, p) for p in patterns))

    if not named(ALONE):
        raise UserError(f"{held.name}: holds no tokenizer; none of {', '.join(ALONE)} is there")
    return named(ALONE) + named(BESIDE)


def fetched_tokenizer(folder: Path, spec: Tokenizer) -> dict[str, Any] | None:
    """Fingerprint of a finished tokenizer that was fetched under the same hub name, else None."""
    try:
        made = read_manifest(folder / "tokenizer").fingerprint["fingerprint"]
    except UserError:
        return None
    return made if made.get("hub", {}).get("path") == spec.path else None


def pinned_path(data_dir: str | os.PathLike, spec: Tokenizer) -> str | None:
    """Path of the tokenizer; a hub name as of the commit that the finished stage fetched."""
    made = fetched_tokenizer(Path(data_dir), spec)
    return made["hub"]["commit"] if made and spec.path is not None else spec.path
