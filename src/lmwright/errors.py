"""The one exception a user may cause.

`UserError` carries one clear sentence: what (file, line, dotted field), what was wrong,
and the cure. The command line prints it without a traceback and exits with code 2.
"""

import os

from lmwright.guard.urls import redact_text

ERROR = "lmwright: error: "  # before the sentence, on stderr
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # by Ctrl-C, as shells count
EXIT_TRANSIENT = 48  # under a supervisor in place of 2, for TransientError


class UserError(Exception):
    """Bad input from outside; `str(error)` is the whole message, without credentials of URLs."""

    exit_code = EXIT_USER_ERROR

    def __init__(self, message: str):
        super().__init__(redact_text(message))

    def at(self, place: str) -> "UserError":
        """An error of the same kind, told of a field of the run."""
        return type(self)(f"{place}: {self}")


class TransientError(UserError):
    """Trouble that may pass, as a service that does not answer: another try may succeed, and a
    supervisor makes it."""

    def __init__(self, message: str):
        super().__init__(message)
        if os.environ.get("LMWRIGHT_HEARTBEAT"):  # guard.heartbeat; this file imports little
            self.exit_code = EXIT_TRANSIENT


class StorageError(TransientError):
    """A read or write that failed."""


def install(extra: str) -> str:
    """Instruction, for messages, to install one of the extras of `pyproject.toml`, in a clone."""
    return f"run `pip install -e '.[{extra}]'` in your clone of lmwright"


def first_line(error: BaseException) -> str:
    """First line of another library's error, for the middle of a sentence."""
    unsaid = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    return (str(error).strip() or unsaid).splitlines()[0].rstrip(".")
