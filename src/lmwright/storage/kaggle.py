"""Datasets of Kaggle by name: `kaggle://owner/dataset[@version][/file]`, through its client.

    name --client--> version, files --each when it is read--> ~/.cache/lmwright/kaggle/OWNER/DATASET

A file is fetched whole, once for each version of its dataset.
"""

import contextlib
import fnmatch
import functools
import io
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmwright.errors import UserError, first_line
from lmwright.storage.kaggle_client import TOKENS, client, log_in, without_token

PREFIX = "kaggle://"
NAME = re.compile(r"kaggle://([\w-]+)/([\w-]+)(?:@(\d+))?(?:/(.*))?")
PAGE_FILES = 200
GLOB = re.compile(r"[*?\[]")


def is_kaggle_name(path: str | os.PathLike) -> bool:
    """True if a path is the name of a dataset of Kaggle."""
    return str(path).startswith(PREFIX)


@dataclass(frozen=True)
class Dataset:
    """A version of a dataset; `files` are sizes in bytes by name."""

    owner: str
    slug: str
    version: int
    files: dict[str, int]

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.owner}/{self.slug}@{self.version}"

    def within(self, path: str) -> list[str]:
        """Files at a path: a file, a folder, a glob as on a disk, or nothing for all."""
        if path in self.files:
            return [path]
        if GLOB.search(path):
            from fsspec.utils import glob_translate

            matches = re.compile(glob_translate(path)).match
            return sorted(name for name in self.files if matches(name))
        folder = f"{path.rstrip('/')}/" if path else ""
        return sorted(name for name in self.files if name.startswith(folder))


def find_dataset(path: str) -> tuple[Dataset, str]:
    """The dataset of a name, of its newest version unless it says one, and the path within it.

    Raises UserError, which begins with the name, where there is none, or it may not be read.
    """
    match = NAME.fullmatch(path)
    if match is None:
        raise UserError(
            f"{path}: is not the name of a dataset; write kaggle://owner/dataset, or "
            "kaggle://owner/dataset@version/file"
        )
    owner, slug, version, inner = match.groups()
    with _told(path):
        return _find(owner, slug, int(version or 0)), inner or ""


def fetch_file(path: str) -> Path:
    """Local copy of one file, `kaggle://owner/dataset@version/file`. Raises UserError."""
    dataset, name = find_dataset(path)
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "lmwright", "kaggle", dataset.owner, dataset.slug, str(dataset.version))
    place = folder / name
    outside = name.startswith("/") or ".." in name.split("/")  # as a listing may say
    if name not in dataset.files or outside:
        raise UserError(f"{path}: there is no such file in the dataset; look at its page")
    size = dataset.files[name]
    if place.exists() and (not size or place.stat().st_size == size):
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with _told(path), tempfile.TemporaryDirectory(dir=folder, prefix=".") as temp:
        part = Path(temp, "file")
        _download(dataset, name, part)
        if size and part.stat().st_size != size:
            raise UserError(
                f"{path}: {part.stat().st_size:,} bytes came instead of {size:,}; run again"
            )
        os.replace(part, place)
    return place


def fetch_files(path: str, wanted: tuple[str, ...]) -> Path:
    """Local folder with the files at a path whose names match one of `wanted`, or the local file
    that the path names. Raises UserError where there is none."""
    dataset, inner = find_dataset(path)
    if inner in dataset.files:
        return fetch_file(f"{dataset.name}/{inner}")
    folder = f"{inner.rstrip('/')}/" if inner else ""
    names = [n for n in dataset.within(inner) if "/" not in n.removeprefix(folder)]
    names = [n for n in names if any(fnmatch.fnmatch(n.removeprefix(folder), w) for w in wanted)]
    if not names:
        raise UserError(f"{path}: holds none of {', '.join(wanted)}; name the folder within it")
    for name in names:
        local = fetch_file(f"{dataset.name}/{name}")
    return local.parent


@functools.lru_cache(8)
def _find(owner: str, slug: str, version: int) -> Dataset:
    from kagglesdk.datasets.types.dataset_api_service import ApiGetDatasetRequest

    api = _api()
    request = ApiGetDatasetRequest()
    request.owner_slug, request.dataset_slug = owner, slug
    if not version:
        with api.build_kaggle_client() as kaggle:
            version = kaggle.datasets.dataset_api_client.get_dataset(request).current_version_number
    files: dict[str, int] = {}
    page = None
    while True:
        answer = api.dataset_list_files(f"{owner}/{slug}/{version}", page, PAGE_FILES)
        if answer.error_message:
            raise ValueError(answer.error_message)
        files |= {file.name: file.total_bytes or 0 for file in answer.dataset_files or []}
        page = answer.next_page_token
        if not page:
            return Dataset(owner, slug, version, files)


def _download(dataset: Dataset, name: str, to: Path) -> None:
    from kagglesdk.datasets.types.dataset_api_service import ApiDownloadDatasetRequest

    api, request = _api(), ApiDownloadDatasetRequest()
    request.owner_slug, request.dataset_slug = dataset.owner, dataset.slug
    request.dataset_version_number = dataset.version
    request.file_name, request.raw = name, True  # else some come as zip archives
    with api.build_kaggle_client() as kaggle, contextlib.redirect_stdout(io.StringIO()):
        answer = kaggle.datasets.dataset_api_client.download_dataset(request)
        api.download_file(answer, str(to), kaggle.http_client(), True, False)


@functools.lru_cache(1)
def _api() -> Any:
    api = client(PREFIX)
    log_in(api, PREFIX)
    return api


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Context around calls of the client: an exception becomes a UserError that begins with the
    name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the client raises many kinds
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (403, 404) or "denied" in str(error):
            why = "there is no such dataset, or this account may not read it; open its page while "
            why += "you are logged in, and accept its rules if it has some"
        elif status == 401:
            why = f"Kaggle does not accept the token; make a new one at {TOKENS}"
        else:
            why = f"Kaggle cannot be asked ({without_token(first_line(error)):.200}); try again"
        raise UserError(f"{name}: {why}") from None
