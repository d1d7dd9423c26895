"""Patience: questions to a server of files, asked again while it does not answer.

A server that has answered before gets minutes to come back, as a run that reads its rows there has
work to lose. One that never did is told at once: its name may be wrong.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lmwright.errors import StorageError, UserError, first_line
from lmwright.guard.urls import redact_text
from lmwright.storage.bucket import code_may_pass
from lmwright.storage.hub import bound_waits

WAITS_S = (1, 2, 4, 8, 15, 30, 60, 60, 60, 60)  # 300 in all
MOST_S = 300.0
LOOK_S = 0.5
SILENT_S = 30.0  # of a server that answers nothing more
SILENT_BUCKET_S = 15.0  # of a bucket, which gcsfs asks six times
WAITS = {
    "http": "client_kwargs", "https": "client_kwargs",
    "gs": "requests_timeout", "gcs": "requests_timeout",
}  # fmt: skip
"""File systems on aiohttp, and their option that bounds the waits."""
REFUSED = (PermissionError, NotImplementedError, ValueError, TypeError)


def url_filesystem(url: str) -> tuple[Any, str]:
    """fsspec filesystem of a URL and the path in it.

    gcsfs logs each error with its traceback before it raises it; only the raised one is shown,
    unless its logger was given a level.
    """
    import fsspec

    logger = logging.getLogger("gcsfs")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
    kinds = {part.partition("://")[0] for part in url.split("::") if "://" in part}
    with suppress(ImportError):  # which fsspec tells with its cure
        if "hf" in kinds:
            bound_waits()
    return fsspec.core.url_to_fs(url, **{kind: _waits(kind) for kind in kinds & WAITS.keys()})


def _waits(kind: str) -> dict[str, Any]:
    """Options of a file system by which silence ends a request, and nothing else does. Without
    them, gcsfs waits for ever, and aiohttp ends a request after five minutes, also where bytes come
    all the time. What the user set for fsspec counts."""
    import fsspec

    try:
        import aiohttp
    except ImportError:
        return {}
    option, options = WAITS[kind], {}
    for name in (name for name, each in WAITS.items() if each == option):
        options |= fsspec.config.conf.get(name, {})
    of_web = option == "client_kwargs"
    silent_s = SILENT_S if of_web else SILENT_BUCKET_S
    waits = aiohttp.ClientTimeout(total=None, sock_connect=silent_s, sock_read=silent_s)
    if of_web:
        return {option: {"timeout": waits} | options.get(option, {})}
    return {option: options.get(option, waits)}


class Patience:
    """Questions to the server of a URL; other libraries' errors become sentences."""

    def __init__(self, url: str):
        self._url, self._answered, self._away = url, False, False
        self.hurried = False
        """True while nobody needs an answer that does not come at once."""

    def ask(self, question: Callable[[], Any]) -> Any:
        """The answer. Raises FileNotFoundError, StorageError where the server stays away, and
        UserError for what it refuses."""
        failed_at = None
        for wait_s in (*(WAITS_S if self._answered else ()), None):
            try:
                with self.told():
                    answer = question()
            except StorageError as error:
                failed_at = failed_at or time.monotonic()
                late = time.monotonic() - failed_at > MOST_S  # a silent server takes long, too
                if wait_s is None or late or self.hurried:
                    raise
                if not self._away:  # several threads ask
                    self._away = True
                    note = f"lmwright: {error}; asking again for {sum(WAITS_S) / 60:.0f} minutes"
                    print(note, file=sys.stderr, flush=True)
                self._pause(wait_s)
            else:
                self._answered, self._away = True, False
                return answer

    def _pause(self, wait_s: float) -> None:
        end = time.monotonic() + wait_s
        while not self.hurried and (left_s := end - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))

    @contextmanager
    def told(self) -> Iterator[None]:
        """Context in which errors of file systems become sentences."""
        try:
            yield
        except (UserError, FileNotFoundError):
            raise
        except Exception as error:  # each file system raises its own kinds
            kind, cure = UserError, "check its name, and your rights to it"
            if may_pass(error):
                kind, cure = StorageError, "check its name and the network"
            reason = redact_text(first_line(error))[:200]
            raise kind(f"{self._url}: cannot be read: {reason}; {cure}") from error


def may_pass(error: Exception) -> bool:
    """True for trouble of a network or a server; False for what it refuses."""
    response = getattr(error, "response", None)
    codes = [getattr(error, "status", None), getattr(error, "code", None)]
    codes += [getattr(response, "status_code", None)]
    code = next((int(c) for c in codes if isinstance(c, int) or str(c).isdigit()), 0)
    if not code_may_pass(code):
        return False
    return 400 <= code < 500 or not isinstance(error, REFUSED)
