"""Models by hub name: `hf://owner/name[@revision]`, or `hf://owner/name/file.gguf[@revision]`.

Only safetensors (or the one GGUF file), JSON and tokenizer files are fetched; pickles and code
never are. A token for gated models comes from the environment (HF_TOKEN) or `hf auth login`.
"""

import json
import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lmwright.errors import UserError, first_line, install
from lmwright.formats.safetensors import INDEX, PICKLES, SINGLE, some

PREFIX = "hf://"
BESIDE = (
    "*.json", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt", "chat_template.jinja",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
POOLING = "1_Pooling/config.json"  # of sentence-transformers (`formats.sentence`)


def is_hub_name(path: str | os.PathLike) -> bool:
    """True if a path is the name of a model on the hub."""
    return str(path).startswith(PREFIX)


def fetch(name: str, only: Sequence[str] = ()) -> tuple[Path, str]:
    """(local folder or .gguf file, `hf://owner/name@commit`), through the hub's own cache.
    `only` names files of a folder that are wanted instead of all that a model needs.

    Raises UserError where there is no such model, it is gated, it has only pickles, or the
    package is not installed.
    """
    repo, revision, file = _parsed(name)
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants
    except ImportError:
        raise UserError(f"{name}: hub names need huggingface_hub; {install('hf')}") from None
    try:
        if constants.HF_HUB_OFFLINE:
            return _fetched_before(hub, repo, revision, file, name)
        info = hub.HfApi().model_info(repo, revision=revision)
        held = {sibling.rfilename for sibling in info.siblings or ()}
        wanted = [file] if file else list(only) or _wanted(hub, repo, info.sha, held, name)
        if file and file not in held:
            there = some(sorted(each for each in held if each.endswith(".gguf"))) or "none"
            raise UserError(f"{name}: there is no such file; GGUF files there: {there}")
        # by the name of the revision, which the cache then knows offline
        at = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))
        if at.name != info.sha:  # it moved meanwhile
            at = Path(hub.snapshot_download(repo, revision=info.sha, allow_patterns=wanted))
    except UserError:
        raise
    except Exception as error:  # the client raises many kinds
        raise UserError(f"{name}: {_said(error, repo, revision)}") from None
    return (at / file if file else at), f"{PREFIX}{repo}@{info.sha}"


def _fetched_before(
    hub: Any, repo: str, revision: str | None, file: str | None, name: str
) -> tuple[Path, str]:
    """Files of a repository from the hub's cache, without the network."""
    cached = hub.try_to_load_from_cache(repo, file or "config.json", revision=revision)
    if not isinstance(cached, str):
        raise UserError(f"{name}: was not fetched before, and HF_HUB_OFFLINE is set; unset it")
    inside = (file or "config.json").count("/")
    at = Path(cached).parents[inside]
    return (at / file if file else at), f"{PREFIX}{repo}@{at.name}"


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


def _wanted(hub: Any, repo: str, commit: str, held: set[str], name: str) -> list[str]:
    if INDEX in held:
        index = Path(hub.hf_hub_download(repo, INDEX, revision=commit))
        try:
            weights = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{name}: its {INDEX} cannot be read ({error})") from None
    elif SINGLE in held:
        weights = [SINGLE]
    else:
        raise UserError(f"{name}: {_no_weights(held)}")
    top = [each for each in held if "/" not in each or each == POOLING]
    return weights + sorted(each for each in top if any(fnmatch(each, p) for p in BESIDE))


def _no_weights(held: set[str]) -> str:
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


def _said(error: Exception, repo: str, revision: str | None) -> str:
    """Sentence for an error of the client, without the token."""
    from huggingface_hub import errors

    token = "set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.GatedRepoError):
        return f"is gated; accept its terms at https://huggingface.co/{repo} and {token}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no such model, or it is private: check the name, or {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {revision!r}"
    text = first_line(error)
    for secret in filter(None, map(os.environ.get, ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))):
        text = text.replace(secret, "***")
    return f"cannot be fetched ({text}); try again, or give a local folder"
