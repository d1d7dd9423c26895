"""Kaggle's official client, logged in.

`$KAGGLE_API_TOKEN`, `$KAGGLE_USERNAME` with `$KAGGLE_KEY`, or a file in ~/.kaggle hold the token,
as the client documents. It reaches no message.
"""

import contextlib
import io
import os
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmwright.errors import UserError, first_line, install

TOKENS = "https://www.kaggle.com/settings"
VARIABLES = ("KAGGLE_API_TOKEN", "KAGGLE_KEY")
ANSWER_S = 60.0
UPLOAD_TRIES = 3
FILES = ("access_token", "access_token.txt", "kaggle.json", "credentials.json")


def check_token(what: str) -> None:
    """Raises UserError, which begins with `what`, where this machine has no token."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    folders = [Path.home() / ".kaggle", Path(config, "kaggle")]
    if configured := os.environ.get("KAGGLE_CONFIG_DIR"):
        folders.append(Path(configured))
    saved = any((folder / name).exists() for folder in folders for name in FILES)
    if not saved and not any(map(os.environ.get, VARIABLES)):
        raise UserError(
            f"{what}: no token here; make one at {TOKENS} (API), then set KAGGLE_API_TOKEN "
            "or run `kaggle auth login`"
        )


def check_client(what: str) -> None:
    """Raises UserError where the client is not installed."""
    from importlib.util import find_spec

    if find_spec("kaggle") is None:
        raise UserError(f"{what}: needs Kaggle's client; {install('kaggle')}")


def client(what: str) -> Any:
    """The client, not yet logged in."""
    check_client(what)
    check_token(what)
    _bound_waits()
    with contextlib.redirect_stdout(io.StringIO()):  # it logs in at import, and prints
        from kaggle.api.kaggle_api_extended import KaggleApi
    _bound_uploads()
    return KaggleApi()


@cache
def _bound_waits() -> None:
    """Gives the client's calls an end, in this process: it asks without one, already at its import.
    The log of a session, which may be silent for long, is read otherwise."""
    try:
        from kagglesdk.kaggle_http_client import KaggleHttpClient

        begin = KaggleHttpClient._init_session
    except (ImportError, AttributeError):  # another version, whose calls have its own end
        return

    def begin_bounded(self: Any) -> Any:
        begun, again = self._session is not None, begin(self)
        if not begun:
            self._session.send = partial(self._session.send, timeout=ANSWER_S)
        return again

    KaggleHttpClient._init_session = begin_bounded


class NoAnswer(BaseException):
    """A server of uploads does not answer. An Exception would be no end: of each the client makes
    another try."""


@cache
def _bound_uploads() -> None:
    """Gives the client's uploads an end, in this process: it sends them by sessions of their own,
    without one. Raises NoAnswer, then, from a call that uploads."""
    from kaggle.api import kaggle_api_extended as extended

    requests = getattr(extended, "requests", None)
    if not hasattr(requests, "Session"):  # another version
        return

    class Upload(requests.Session):  # type: ignore[misc, name-defined]
        silent = 0  # requests in a row without an answer

        def mount(self, prefix: str, adapter: Any) -> None:
            adapter.max_retries = adapter.max_retries.new(connect=1, read=0)
            super().mount(prefix, adapter)

        def send(self, request: Any, **options: Any) -> Any:
            try:
                answer = super().send(request, **options | {"timeout": ANSWER_S})
            except (requests.exceptions.Timeout, requests.exceptions.ConnectionError) as error:
                Upload.silent += 1
                if Upload.silent < UPLOAD_TRIES:
                    raise
                Upload.silent = 0
                raise NoAnswer(first_line(error)) from error
            Upload.silent = 0
            return answer

    extended.requests = SimpleNamespace(**vars(requests) | {"Session": Upload})


def log_in(api: Any, what: str) -> None:
    """Logs the client in. Raises UserError where its token is not accepted, and what the client
    raises where nobody answers."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            api.authenticate()
    except SystemExit:
        raise UserError(
            f"{what}: Kaggle does not accept the token; make a new one at {TOKENS} "
            "and set KAGGLE_API_TOKEN"
        ) from None


def without_token(text: str) -> str:
    """A text with `***` in place of the token."""
    for token in filter(None, map(os.environ.get, VARIABLES)):
        text = text.replace(token, "***")
    return text
