"""publish: a run, a folder or a GGUF file on the Hugging Face hub.

everything checked --> repository there --> staged --> shown --> committed      (once a branch)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lmwright.checkpoint.saved import SavedStates
from lmwright.errors import UserError
from lmwright.formats.open import RUN
from lmwright.guard.temporary import temporary_folder
from lmwright.publish import account
from lmwright.publish.card import Listing, files_table
from lmwright.publish.licenses import check_license
from lmwright.publish.stage import (
    Staged,
    Subject,
    complete,
    metadata_text,
    open_source,
    stage,
    stated,
)


@dataclass(frozen=True)
class Sending:
    """Form in which a subject is sent."""

    branch: str
    parent: str | None
    """Commit that it must follow."""
    public: bool
    dry_run: bool


def publish_command(
    path: str | Path,
    repo: str | None = None,
    *,
    listing: Listing,
    public: bool = False,
    gguf: Sequence[str] = (),
    checkpoints: str | None = None,
    revision: str | None = None,
    adapter: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    ask_license: Callable[[], str] | None = None,
) -> None:
    """Publishes what lies at `path` as `repo` (owner/name), or as the run's `publish` section says.

    `checkpoints` is `all` or steps with commas: each becomes a branch `step-N` beside the newest.
    Raises UserError for anything that a user can cure, most of it before any export.
    """
    account.client()
    place, kind = open_source(path)
    section = place.run.publish if kind == RUN else None
    if section is not None:
        repo = repo or section.repo
        public = public or section.visibility == "public"
        listing = replace(listing, license=listing.license or section.license)
    if repo is None:
        raise UserError(f"{path}: no repository to publish to; add owner/name")
    account.check_name(repo)
    if revision is not None:
        account.check_branch(revision)
    if kind != RUN and (checkpoints or adapter):
        raise UserError(f"{path}: is not a run directory; leave out --checkpoints and --adapter")
    subject = complete(Subject(place, kind, repo, listing, tuple(gguf), dtype, adapter))
    _check_dtype(subject)
    branches: dict[str, int | None] = {revision or account.MAIN: None}
    branches |= {f"step-{step}": step for step in _steps(subject, checkpoints)}
    subject = _licensed(subject, None if dry_run else ask_license, dry_run=dry_run)
    api, parents = None, {}
    if not dry_run:  # before the export, which may take long
        api = account.open_repo(repo, public=public)
        newest = account.newest_commit
        parents = {b: newest(api, repo, b, overwrite=overwrite) for b in branches}
    for branch, step in branches.items():
        _send(api, subject, Sending(branch, parents.get(branch), public, dry_run), step)


def _licensed(subject: Subject, ask_license: Callable[[], str] | None, *, dry_run: bool) -> Subject:
    """The subject with a license that the hub knows: of an option, the run or the card, or asked
    for."""
    listing = subject.listing
    name = listing.license_name or stated(subject.place, subject.kind).get("license_name")
    if listing.license is None and ask_license is not None:
        listing = replace(listing, license=ask_license())
    if listing.license is None and not dry_run:
        raise UserError(
            f"{subject.place.path}: has no license yet; add --license apache-2.0, or another that "
            "the data and the base model allow"
        )
    if listing.license is not None:
        check_license(listing.license, name)
    return replace(subject, listing=listing)


def _check_dtype(subject: Subject) -> None:
    if subject.dtype and (subject.kind != RUN or subject.adapters):
        raise UserError(
            f"--dtype: {subject.place.path} is sent as it is; leave it out, or write another dtype "
            "with lmwright export first"
        )


def _steps(subject: Subject, checkpoints: str | None) -> list[int]:
    """The checkpoints that are published as branches, oldest first. Raises UserError for a run
    without the checkpoints that are asked for."""
    if subject.kind != RUN:
        return []
    there, wanted = SavedStates(subject.place.path).steps(), subject.place.step
    if not there or wanted not in (None, *there):
        listed = ", ".join(map(str, there)) or "none; train at least one step"
        raise UserError(f"{subject.place.path}: has no such checkpoint; there are: {listed}")
    if checkpoints is None:
        return []
    if checkpoints == "all":
        return there
    words = [word.strip() for word in checkpoints.split(",")]
    if wrong := [word for word in words if not word.isdecimal() or int(word) not in there]:
        raise UserError(
            f"--checkpoints: there is no checkpoint {wrong[0]!r} in {subject.place.path}; there "
            f"are: {', '.join(map(str, there)) or 'none'}"
        )
    return sorted({int(word) for word in words})


def _send(api: Any, subject: Subject, sending: Sending, step: int | None = None) -> None:
    """Stages, shows and, unless it is a dry run, commits."""
    repo, parent = subject.repo, sending.parent
    with temporary_folder() as temporary:
        folder = Path(temporary) / repo.rpartition("/")[2]
        with _room_in(temporary):
            staged = stage(subject, folder, step)
        _show(subject, sending, staged, folder)
        if api is None:
            return
        options = {"branch": sending.branch, "parent": parent, "title": staged.title}
        address = account.upload(api, folder, repo, stale=list(staged.stale), **options)
    if parent and address.endswith(parent):
        print(f"nothing was sent: all files are there, unchanged since {parent[:8]}")
    else:
        print(f"published: {address}")


@contextmanager
def _room_in(temporary: str) -> Iterator[None]:
    """A disk that takes no more is told by the folder that the user can change."""
    try:
        yield
    except (OSError, UserError) as error:
        cause = error.__cause__ if isinstance(error, UserError) else error
        of_disk = isinstance(cause, OSError | SafetensorError)
        if not of_disk or temporary not in f"{error} {getattr(error, 'filename2', '')}":
            raise
        raise UserError(
            f"{Path(temporary).parent}: the files to publish cannot be written there "
            f"({getattr(cause, 'strerror', None) or cause}); free some space, or set TMPDIR to a "
            "folder with more"
        ) from error


def _show(subject: Subject, sending: Sending, staged: Staged, folder: Path) -> None:
    files = files_table(folder)
    total = sum(row["bytes"] for row in files)
    verb = "would be" if sending.dry_run else "is"
    visibility = "public" if sending.public else "private"
    print(
        f"{staged.title} {verb} published as {subject.repo}, branch {sending.branch}, {visibility}"
    )
    print(metadata_text(staged.metadata))
    if not subject.listing.license:
        print("  license: missing; without --license nothing is published")
    for row in files:
        print(f"  {row['bytes']:>15,}  {row['file']}")
    print(f"  {total:>15,}  bytes in {len(files)} files")
    if sending.dry_run:
        print("a dry run: nothing was sent")
