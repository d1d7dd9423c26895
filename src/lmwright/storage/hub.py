"""Hub: files of a Hugging Face repository by name, `hf://owner/name[@revision]`.

They come through the hub's own cache. A token for gated repositories comes from the environment
(HF_TOKEN) or `hf auth login`, and reaches no message.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lmwright.errors import UserError, first_line, install

PREFIX = "hf://"
ANSWER_S = 30.0
"""A hub that says nothing for so long does not answer; the client itself asks some questions for
ever."""
WRITTEN_S = 300.0
"""The same of what is sent to it, which it works on before it answers."""


def is_hub_name(path: str | os.PathLike) -> bool:
    """True if a path is the name of a repository on the hub."""
    return str(path).startswith(PREFIX)


@cache
def bound_waits() -> None:
    """Gives every request of the client an end from now on, in this process. A program's own
    client, set by `set_client_factory`, keeps its own."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    factory = getattr(_http, "default_client_factory", None)  # which later versions may not have
    if factory and getattr(_http, "_GLOBAL_CLIENT_FACTORY", factory) is factory:
        set_client_factory(lambda: _bounded(factory()))


def _bounded(client: Any) -> Any:
    def bound(request: Any) -> None:
        most = ANSWER_S if request.method in ("GET", "HEAD") else WRITTEN_S
        asked = request.extensions.get("timeout", {})
        names = ("connect", "read", "write", "pool")
        ends = {name: asked.get(name) or most for name in names}
        request.extensions["timeout"] = ends | {"connect": asked.get("connect") or ANSWER_S}

    hooks = client.event_hooks
    client.event_hooks = hooks | {"request": [*hooks.get("request", ()), bound]}
    return client


@dataclass(frozen=True)
class Held:
    """Files that a repository holds at one commit."""

    name: str
    """Its name as the user wrote it."""
    repo: str
    commit: str
    files: frozenset[str]

    def download(self, file: str) -> Path:
        """One file, fetched. Raises what the client raises."""
        import huggingface_hub as hub

        return Path(hub.hf_hub_download(self.repo, file, revision=self.commit))


def fetch_files(
    name: str,
    repo: str,
    revision: str | None,
    choose: Callable[[Held], Sequence[str]],
    *,
    known_by: Sequence[str],
    what: str = "model",
) -> tuple[Path, str]:
    """(local folder with the chosen files, commit) of a repository.

    `choose` names them, of what is held. Without the network (HF_HUB_OFFLINE), the folder is found
    by the first file of `known_by` that was fetched before. `what` is what messages call it.
    Raises UserError, which begins with `name`, where there is no such repository, it is gated, or
    the package is not installed.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants
    except ImportError:
        raise UserError(f"{name}: hub names need huggingface_hub; {install('hf')}") from None
    try:
        bound_waits()
        if constants.HF_HUB_OFFLINE:
            return _fetched_before(name, repo, revision, known_by)
        info = hub.HfApi().model_info(repo, revision=revision)
        files = frozenset(sibling.rfilename for sibling in info.siblings or ())
        wanted = list(choose(Held(name, repo, info.sha, files)))
        # by the name of the revision, which the cache then knows offline
        at = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))
        if at.name != info.sha:  # it moved meanwhile
            at = Path(hub.snapshot_download(repo, revision=info.sha, allow_patterns=wanted))
        return at, info.sha
    except UserError:
        raise
    except Exception as error:  # the client raises many kinds
        raise UserError(f"{name}: {sentence(error, repo, revision, what)}") from None


def _fetched_before(
    name: str, repo: str, revision: str | None, known_by: Sequence[str]
) -> tuple[Path, str]:
    """Files of a repository from the hub's cache, without the network."""
    import huggingface_hub as hub

    for file in known_by:
        cached = hub.try_to_load_from_cache(repo, file, revision=revision)
        if isinstance(cached, str):
            at = Path(cached).parents[file.count("/")]
            return at, at.name
    raise UserError(f"{name}: was not fetched before, and HF_HUB_OFFLINE is set; unset it")


def sentence(error: Exception, repo: str, revision: str | None, what: str) -> str:
    """Sentence for an error of the client about a `what`, without the token; of a dataset, `repo`
    begins with `datasets/`."""
    from huggingface_hub import errors

    token = "set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.GatedRepoError):
        return f"is gated; accept its terms at https://huggingface.co/{repo} and {token}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no such {what}, or it is private: check the name, or {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {revision!r}"
    return (
        f"cannot be fetched ({without_token(first_line(error))}); check that this machine reaches "
        "the internet and try again, or give a local folder"
    )


def without_token(text: str) -> str:
    """A text with `***` in place of the hub's token."""
    from huggingface_hub import get_token

    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    for token in filter(None, (get_token(), *map(os.environ.get, names))):
        text = text.replace(token, "***")
    return text
