"""Interrupts that Python drops, sent once more, or that come as another error.

A signal's exception that comes in a callback of the garbage collector or in a `__del__` is printed
and forgotten. JAX has such a callback, which runs often while it traces and compiles: without this,
one Ctrl-C in ten has no effect there.
"""

import signal
import sys
import threading
from typing import Any

AGAIN_S = 0.02  # by then the callback has ended


def send_again() -> None:
    """From now on, sends interrupts that were dropped once more; other exceptions that nobody can
    catch are shown as before."""
    before = sys.unraisablehook
    if getattr(before, "sends_again", False):
        return

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            before(unraisable)
            return
        main = threading.main_thread().ident
        timer = threading.Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))
        timer.daemon = True
        timer.start()

    hook.sends_again = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def was_interrupted(error: BaseException | None) -> bool:
    """True for the error of a library in C that was interrupted while it was imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
