"""Standard output whose reader leaves, that is closed, or whose encoding lacks characters.

lmwright plan ... | head -1      the command ends quietly, as a signal of the pipe would end it
lmwright train ... >&-           what is printed goes nowhere
PYTHONIOENCODING=latin-1         other characters are printed as in JSON, "\\u0142"
"""

import codecs
import json
import os
import select
import sys
from contextlib import suppress

EXIT_UNREAD = 141  # 128 and SIGPIPE, as shells count; 0 and 1 are answers of some verbs


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


def is_of_pipe(error: BaseException | None) -> bool:
    """True for the error of a closed pipe, and for the SystemExit that rich makes of it."""
    if isinstance(error, SystemExit):
        return is_of_pipe(error.__context__)
    return isinstance(error, BrokenPipeError)


def leave_output(error: BaseException | None) -> bool:
    """Lets what is still to be written go nowhere, where an error of a pipe came because nobody
    reads standard output or error any more; False where it is another pipe."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    unread = [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]
    for descriptor in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return bool(unread) or isinstance(error, SystemExit)  # rich has left it already
