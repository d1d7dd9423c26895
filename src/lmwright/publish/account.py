"""The hub, through its official client: access checked before any work, and commits.

    package, token --> whoami --> create_repo --> auth_check --> newest commit --> upload_folder

Everything that goes wrong there is one sentence, without the token.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmwright
from lmwright.errors import UserError, first_line, install
from lmwright.storage.hub import bound_waits, without_token

TOKENS = "https://huggingface.co/settings/tokens"
OURS = "lmwright publish: "
"""Beginning of the titles of our commits."""
FIRST = "initial commit"  # the hub's own, of a new repository
MAIN = "main"
NO_BRANCH = re.compile(
    r"[\0-\x20\x7f~^:?*\[\\]|\.\.|@\{|^(@|HEAD)?$|^[-/]|[./]$|//|(^|/)\.|\.lock(/|$)"
)
"""What makes a text no name of a branch."""


def client() -> Any:
    """The package huggingface_hub. Raises UserError where it is not installed."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"publish: needs huggingface_hub; {install('hf')}") from None
    bound_waits()
    return huggingface_hub


def check_name(repo: str, place: str = "") -> None:
    """Raises UserError for what is no name of a repository, and says the place that has it."""
    client()
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    problem = "it lacks the owner" if repo.count("/") != 1 else ""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        problem = problem or first_line(error)
    if problem:
        where = f"{place}: {repo!r}" if place else f"{repo!r}:"
        raise UserError(f"{where} is not a name on the hub ({problem:.200}); write owner/name")


def check_branch(name: str) -> None:
    """Raises UserError for what git does not take as a branch's name (git check-ref-format)."""
    if NO_BRANCH.search(name):
        raise UserError(
            f"--revision: {name!r} is not a name that git takes for a branch; use letters, digits, "
            "'.', '_', '-' and single slashes, such as v1.0"
        )


def check_token() -> None:
    """Raises UserError where there is no token, or the hub may not be asked."""
    hub = client()
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise UserError("publish: HF_HUB_OFFLINE is set; unset it, or look with --dry-run")
    if not hub.get_token():
        raise UserError(
            f"publish: no token for the hub; make one that may write at {TOKENS}, then set "
            "HF_TOKEN or run `hf auth login`"
        )


@contextmanager
def asking(repo: str) -> Iterator[None]:
    """Context around a call of the client: an exception becomes a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the client raises many kinds
        raise UserError(f"{repo}: {without_token(_sentence(error))}") from None


def _sentence(error: Exception) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = f"{first_line(error):.300}"
    if isinstance(error, ValueError) and not isinstance(error, errors.HfHubHTTPError):
        lines = " ".join(str(error).split())  # the hub's own checks of the card's metadata
        return f"the hub refuses the card ({lines:.300}); correct README.md or the options"
    known = {
        401: f"the hub does not accept the token; make a new one at {TOKENS} and set HF_TOKEN",
        403: f"the token may not write there; give it that right at {TOKENS}, or take another name",
        404: f"is not there, or the token may not see it; see the name and its rights at {TOKENS}",
        412: "someone else changed it meanwhile; look at what changed and publish again",
        413: "the hub finds a file too large; export with a smaller --max-shard-bytes",
        429: "the hub asks to wait (too many requests); publish again in some minutes",
    }
    if status in known:
        return known[status]
    if status is None:
        return f"the hub cannot be reached ({reason}); check the network and publish again"
    return f"the hub answered with an error ({reason}); publish again later"


def open_repo(repo: str, *, public: bool) -> Any:
    """The client's API for a repository that this token may write, made if it was not there.
    Raises UserError for anything that would fail later, and for another visibility than asked."""
    check_token()
    hub = client()
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    api = hub.HfApi(library_name="lmwright", library_version=lmwright.__version__)
    owner = repo.partition("/")[0]
    with asking(repo):
        me = api.whoami()
    owners = [me["name"], *(org["name"] for org in me.get("orgs", ()))]
    if owner.lower() not in map(str.lower, owners):
        raise UserError(f"{repo}: the token is of {me['name']}; take one of {', '.join(owners)}")
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"{repo}: the token may only read; make one that may write at {TOKENS}")
    with asking(repo):
        api.create_repo(repo, private=not public, exist_ok=True)
        api.auth_check(repo, write=True)
        private = bool(api.model_info(repo).private)
    if private == public:
        there, cure = ("private", "leave out --public") if private else ("public", "say --public")
        raise UserError(f"{repo}: is {there} already; {cure}, or change it in its settings there")
    return api


def newest_commit(api: Any, repo: str, branch: str, *, overwrite: bool) -> str | None:
    """The commit that ours will follow on a branch, which is made empty if it is not there. Raises
    UserError if it is not of `lmwright publish`, unless it may be overwritten."""
    with asking(repo):
        branches = [ref.name for ref in api.list_repo_refs(repo).branches]
        if branch not in branches:
            # from the first commit: until ours, nothing of another checkpoint is there
            *_, first = [None, *api.list_repo_commits(repo)]
            api.create_branch(repo, branch=branch, revision=first and first.commit_id)
        commits = api.list_repo_commits(repo, revision=branch)
    if not commits:
        return None
    last = commits[0]
    theirs = branch in branches and not last.title.lower().startswith((OURS, FIRST))
    if theirs and not overwrite:
        raise UserError(
            f"{repo}: was last changed by {last.title[:80]!r} ({last.commit_id[:8]} on {branch}), "
            "which may be undone; look at it, and publish again with --overwrite"
        )
    return last.commit_id


def upload(
    api: Any, folder: Path, repo: str, *, branch: str, parent: str | None, title: str, stale: list
) -> str:
    """Commits the files of a folder, and deletes those there that match `stale`; returns the
    commit's address. Fails if `parent` is no longer the newest commit. Files that are there and
    equal are not sent."""
    with asking(repo):
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=branch,
            commit_message=OURS + title,
            parent_commit=parent,
            delete_patterns=stale,
        )
    return str(commit.commit_url)
