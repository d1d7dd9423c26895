"""The one exception a user may cause.

`UserError` carries one clear sentence: what (file, line, dotted field), what was wrong,
and the cure. The command line prints it without a traceback and exits with code 2.
"""

from lmwright.guard.redact import redact_text

EXIT_INTERRUPTED = 130  # by Ctrl-C, as shells count


class UserError(Exception):
    """Bad input from outside; `str(error)` is the whole message, without credentials of URLs."""

    exit_code = 2

    def __init__(self, message: str):
        super().__init__(redact_text(message))


def install(extra: str) -> str:
    """Instruction to install one of the extras of `pyproject.toml`, for messages; lmwright is not
    on a package index."""
    return f"run `pip install -e '.[{extra}]'` in your clone of lmwright"


def first_line(error: Exception) -> str:
    """First line of another library's error, for the middle of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
