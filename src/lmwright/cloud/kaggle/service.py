"""Kaggle's service, through its official client; what goes wrong there is one sentence.

    token --> user --> quota
    archive --> private dataset          kernel folder --> session --> state, log, output

The token is where `storage.kaggle_client` says.
"""

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lmwright.errors import UserError, first_line
from lmwright.storage.kaggle_client import (
    TOKENS,
    NoAnswer,
    client,
    log_in,
    without_token,
)

ON = "--on kaggle"
ACCELERATOR = "TpuV5E8"
METADATA = "dataset-metadata.json"
READY_EVERY_S = 5.0
READY_WITHIN_S = 1800.0
TIMEOUT_S = 60.0
BLOCK = 1 << 22
ALIVE = ("QUEUED", "RUNNING", "NEW_SCRIPT", "CANCEL_REQUESTED")
"""States of a session that has not ended."""


class Unreachable(Exception):
    """The service cannot be asked now; it may be later."""


@dataclass(frozen=True)
class Quota:
    """Seconds of TPU time in a week."""

    used_s: float
    total_s: float
    refreshed: datetime | None
    """Start of the next week."""

    @property
    def left_s(self) -> float:
        return max(self.total_s - self.used_s, 0.0)


@dataclass(frozen=True)
class Session:
    """The newest session of a kernel."""

    state: str
    """QUEUED, RUNNING, COMPLETE, ERROR, CANCEL_REQUESTED, CANCEL_ACKNOWLEDGED, NEW_SCRIPT."""
    message: str


class Kaggle:
    """The service for the user of the token. Raises UserError where it refuses, and Unreachable
    where it does not answer."""

    def __init__(self) -> None:
        self._api = client(ON)
        with _told("the token"):
            log_in(self._api, ON)
        self.user = str(self._api.config_values[self._api.CONFIG_NAME_USER])

    def quota(self) -> Quota | None:
        """TPU time of this week; None where the service does not tell."""
        try:
            with _told("the quota"):
                answer = self._api.quota_view()
        except (UserError, Unreachable):
            return None
        quota = answer.tpu_quota
        if quota is None or not quota.total_time_allowed:
            return None
        used = sum(
            period.total_seconds() for period in (quota.time_used, quota.time_reserved) if period
        )
        total = quota.total_time_allowed.total_seconds()
        return Quota(used, total, answer.quota_refresh_time)

    def has_dataset(self, slug: str) -> bool:
        """True if this user has such a dataset, ready or still being processed."""
        try:
            return self._dataset_state(slug) not in ("failed", "deleted")
        except LookupError:
            return False

    def make_dataset(self, slug: str, folder: Path) -> None:
        """Makes a private dataset of the files in a folder, and waits until it can be used. The
        client goes on with an upload that broke off if the folder is the same."""
        about = {"id": f"{self.user}/{slug}", "title": slug, "licenses": [{"name": "other"}]}
        (folder / METADATA).write_text(json.dumps(about))
        lost = Unreachable(f"dataset {slug}: its file did not arrive")
        with _told(f"dataset {slug}"), contextlib.redirect_stdout(io.StringIO()):
            try:
                answer = self._api.dataset_create_new(str(folder), public=False, quiet=True)
            except NoAnswer as error:
                raise Unreachable(f"{lost}, since nobody answers there") from error
            except ValueError as error:
                if "Upload unsuccessful" in str(error):  # the client's words from 2.2.5 on
                    raise lost from error
                raise
        if answer.error:
            raise UserError(_refusal(f"dataset {slug}", answer.error))
        self.wait_for_dataset(slug)
        with _told(f"dataset {slug}"):
            there = self._api.dataset_list_files(f"{self.user}/{slug}").dataset_files
        if not there:  # earlier clients make a dataset even of what they could not upload
            with _told(f"dataset {slug}"):
                self._api.dataset_delete(self.user, slug, no_confirm=True)
            raise lost

    def wait_for_dataset(self, slug: str) -> None:
        """Returns when a dataset can be used. Raises UserError if that takes too long."""
        end = time.monotonic() + READY_WITHIN_S
        while True:
            try:
                state = self._dataset_state(slug)
            except LookupError:
                state = "not there"
            if state == "ready":
                return
            if state in ("failed", "deleted") or time.monotonic() > end:
                raise UserError(
                    f"dataset {slug}: is {state} at Kaggle; look at it there, delete it and "
                    "launch again"
                )
            time.sleep(READY_EVERY_S)

    def _dataset_state(self, slug: str) -> str:
        with _told(f"dataset {slug}", absent=(403, 404)):
            return str(self._api.dataset_status(f"{self.user}/{slug}"))

    def push(self, folder: Path, seconds: int) -> str:
        """Starts a session of a kernel; returns its address."""
        with _told("the kernel"), contextlib.redirect_stdout(io.StringIO()):
            answer = self._api.kernels_push(str(folder), str(seconds), ACCELERATOR)
        if answer.error:
            raise UserError(_refusal("the kernel", answer.error))
        unknown = [*(answer.invalid_dataset_sources or []), *(answer.invalid_kernel_sources or [])]
        if unknown:
            raise UserError(
                f"the kernel: Kaggle does not find its inputs {', '.join(unknown)}; look at "
                f"{answer.url}, stop the session there and launch again"
            )
        return str(answer.url)

    def session(self, kernel: str) -> Session | None:
        """Status of the newest session of a kernel; None where there is no such kernel."""
        try:
            with _told(f"kernel {kernel}", absent=(403, 404)):
                answer = self._api.kernels_status(kernel)
        except LookupError:
            return None
        return Session(answer.status.name, answer.failure_message or "")

    def log(self, kernel: str) -> Iterator[str]:
        """Output of the newest session, as it comes; ends with it."""
        for event in self._api.kernels_logs_stream(kernel):
            if data := event.get("data"):
                yield data if data.endswith("\n") else data + "\n"

    def fetch(self, kernel: str, name: str, folder: Path) -> Path | None:
        """Downloads one file of a kernel's output; None where there is none of that name."""
        import requests

        try:
            with _told(f"output of {kernel}", absent=(403, 404)):
                url = self._output_url(kernel, name)
        except LookupError:
            return None
        if url is None:
            return None
        with _told(f"output of {kernel}"):
            part = folder / f"{name}.part"
            with requests.get(url, stream=True, timeout=TIMEOUT_S) as answer:
                answer.raise_for_status()
                with open(part, "wb") as file:
                    for block in answer.iter_content(BLOCK):
                        file.write(block)
            size = answer.headers.get("Content-Length")
            if size is not None and part.stat().st_size != int(size):
                raise Unreachable(f"output of {kernel}: the connection broke off")
        os.replace(part, folder / name)
        return folder / name

    def _output_url(self, kernel: str, name: str) -> str | None:
        from kagglesdk.kernels.types.kernels_api_service import ApiListKernelSessionOutputRequest

        request = ApiListKernelSessionOutputRequest()
        request.user_name, request.kernel_slug = kernel.split("/")
        while True:
            with self._api.build_kaggle_client() as client:
                answer = client.kernels.kernels_api_client.list_kernel_session_output(request)
            for file in answer.files or []:
                if file.file_name == name:
                    return str(file.url)
            if not answer.next_page_token:
                return None
            request.page_token = answer.next_page_token


@contextlib.contextmanager
def _told(thing: str, absent: tuple[int, ...] = ()) -> Iterator[None]:
    """Context around calls of the client: an exception becomes a UserError, Unreachable, or
    LookupError where the status says that the thing is not there (to others it is forbidden)."""
    import requests

    try:
        yield
    except (UserError, Unreachable, LookupError):
        raise
    except requests.exceptions.HTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in absent:
            raise LookupError(thing) from None
        if status == 429 or status >= 500:
            raise Unreachable(f"{thing}: {without_token(first_line(error))}") from None
        raise UserError(_refusal(thing, str(error), status)) from None
    except (requests.exceptions.RequestException, OSError) as error:
        raise Unreachable(f"{thing}: {without_token(first_line(error))}") from None
    except ValueError as error:  # the client's own checks, and its word for 403
        if absent and "denied" in str(error):
            raise LookupError(thing) from None
        raise UserError(_refusal(thing, str(error))) from None


def _refusal(thing: str, reason: str, status: int = 0) -> str:
    reason = without_token(" ".join(reason.split())[:300].rstrip("."))
    cure = "look at the kernel there, and launch again"
    if status == 401:
        cure = f"make a new token at {TOKENS} and set KAGGLE_API_TOKEN"
    elif re.search(r"phone|verif", reason, re.I):
        cure = (
            f"verify your phone number at {TOKENS}, without which Kaggle gives neither TPUs nor "
            "the internet"
        )
    elif re.search(r"quota|limit", reason, re.I):
        cure = "wait for the week's quota, or stop your other sessions"
    elif status == 403:
        cure = f"accept Kaggle's rules and verify your phone number at {TOKENS}"
    return f"{thing}: Kaggle refuses it ({reason}); {cure}"
