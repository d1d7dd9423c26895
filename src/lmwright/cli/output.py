"""Standard output whose reader leaves, that is closed, or whose encoding lacks characters.

lmwright plan ... | head -1      the command ends quietly, as a signal of the pipe would end it
lmwright train ... | head -1     the run saves first (`train.display`)
lmwright train ... >&-           what is printed goes nowhere
PYTHONIOENCODING=latin-1         other characters are printed as in JSON, "\\u0142"
"""

import codecs
import json
import os
import sys
from contextlib import suppress


class BrokenPipe(Exception):
    """Caused by a pipe that was closed at its other end; click would end quietly with 1."""


def open_output() -> None:
    """Lets standard output and error take any text."""
    codecs.register_error("lmwright", _escape)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    if getattr(sys.stdout, "errors", None) == "strict":
        with suppress(AttributeError):  # another's stream
            sys.stdout.reconfigure(errors="lmwright")


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
