"""Patience: questions to a server of files, asked again while it does not answer.

A server that has answered before gets minutes to come back, as a run that reads its rows there has
work to lose. One that never did is told at once: its name may be wrong.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lmwright.errors import StorageError, UserError, first_line
from lmwright.guard.urls import redact_text
from lmwright.storage.bucket import code_may_pass

WAITS_S = (1, 2, 4, 8, 15, 30, 60, 60, 60, 60)  # 300 in all
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
    return fsspec.core.url_to_fs(url)


class Patience:
    """Questions to the server of a URL; other libraries' errors become sentences."""

    def __init__(self, url: str):
        self._url, self._answered, self._away = url, False, False

    def ask(self, question: Callable[[], Any]) -> Any:
        """The answer. Raises FileNotFoundError, StorageError where the server stays away, and
        UserError for what it refuses."""
        for wait_s in (*(WAITS_S if self._answered else ()), None):
            try:
                with self.told():
                    answer = question()
            except StorageError as error:
                if wait_s is None:
                    raise
                if not self._away:  # several threads ask
                    self._away = True
                    note = f"lmwright: {error}; asking again for {sum(WAITS_S) / 60:.0f} minutes"
                    print(note, file=sys.stderr, flush=True)
                time.sleep(wait_s)
            else:
                self._answered, self._away = True, False
                return answer

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
