"""Models by hub name: `hf://owner/name[@revision]`, or `hf://owner/name/file.gguf[@revision]`.

Only safetensors (or the one GGUF file), JSON and tokenizer files are fetched; pickles and code
never are. A token for gated models comes from the environment (HF_TOKEN) or `hf auth login`.
"""

import json
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from lmwright.errors import UserError
from lmwright.formats.safetensors import INDEX, PICKLES, SINGLE, some
from lmwright.storage.hub import PREFIX, Held, fetch_files
from lmwright.storage.kaggle import fetch_files as fetch_files_of_kaggle
from lmwright.storage.kaggle import find_dataset

BESIDE = (
    "*.json", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt", "chat_template.jinja",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
POOLING = "1_Pooling/config.json"  # of sentence-transformers (`formats.sentence`)


def fetch(name: str, only: Sequence[str] = ()) -> tuple[Path, str]:
    """(local folder or .gguf file, `hf://owner/name@commit`), through the hub's own cache.
    `only` names files of a folder that are wanted instead of all that a model needs.

    Raises UserError where there is no such model, it is gated, it has only pickles, or the
    package is not installed.
    """
    repo, revision, file = _parsed(name)

    def choose(held: Held) -> list[str]:
        if file is None:
            return list(only) or _wanted(held)
        if file not in held.files:
            there = some(sorted(each for each in held.files if each.endswith(".gguf"))) or "none"
            raise UserError(f"{name}: there is no such file; GGUF files there: {there}")
        return [file]

    at, commit = fetch_files(name, repo, revision, choose, known_by=[file or "config.json"])
    return (at / file if file else at), f"{PREFIX}{repo}@{commit}"


def fetch_kaggle(name: str, header: bool = False) -> Path:
    """Local folder of a model in a dataset of Kaggle, or its .gguf file: config.json alone for its
    `header`. Raises UserError."""
    wanted = ("config.json",) if header else (*BESIDE, "*.safetensors")
    at = fetch_files_of_kaggle(name, wanted)
    if at.is_dir() and not header and not any(at.glob("*.safetensors")):
        held = frozenset(find_dataset(name)[0].files)
        raise UserError(f"{name}: {_no_weights(held)}")
    return at


def _parsed(name: str) -> tuple[str, str | None, str | None]:
    """(owner/name, revision, file within) of a hub name."""
    text, _, revision = name.removeprefix(PREFIX).partition("@")
    parts = [part for part in text.split("/") if part]
    file = "/".join(parts[2:])
    if len(parts) < 2 or parts[0] in ("datasets", "spaces") or (file and file[-5:] != ".gguf"):
        raise UserError(
            f"{name}: is not the name of a model; write hf://owner/name, hf://owner/name@revision "
            f"or hf://owner/name/file.gguf"
        )
    return "/".join(parts[:2]), revision or None, file or None


def _wanted(held: Held) -> list[str]:
    if INDEX in held.files:
        index = held.download(INDEX)
        try:
            weights = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{held.name}: its {INDEX} cannot be read ({error})") from None
    elif SINGLE in held.files:
        weights = [SINGLE]
    else:
        raise UserError(f"{held.name}: {_no_weights(held.files)}")
    top = [each for each in held.files if "/" not in each or each == POOLING]
    return weights + sorted(each for each in top if any(fnmatch(each, p) for p in BESIDE))


def _no_weights(held: frozenset[str]) -> str:
    ggufs = sorted(each for each in held if each.endswith(".gguf"))
    if ggufs:
        return f"holds GGUF files; add the name of one: {some(ggufs)}"
    pickles = sorted(each for each in held if any(fnmatch(each, p) for p in PICKLES))
    if pickles:
        return (
            f"holds only pickled weights ({some(pickles)}), which run code when opened and are "
            f"never fetched; look for a revision with safetensors (often @refs/pr/1), or convert "
            f"them in a sandbox with transformers"
        )
    return f"holds no {SINGLE} and no {INDEX}"
