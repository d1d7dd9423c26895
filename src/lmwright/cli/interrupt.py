"""Interrupts that Python or a library drops, sent once more, or that come as another error.

A signal's exception that comes in a callback of the garbage collector or in a `__del__` is printed
and forgotten. JAX has such a callback, which runs often while it traces and compiles: without this,
one Ctrl-C in ten has no effect there.
"""

import signal
import sys
import threading
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any

AGAIN_S = 0.02  # by then the callback has ended
LOADS = {ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__}
"""Python's own functions in which a library in C is loaded."""

_noted = threading.Event()


def note_interrupts() -> None:
    """From now on, notes each Ctrl-C, and puts it off while a library in C is imported: these drop
    it, crash, or make another error of it, which does not say where it comes from."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _note)


def _note(number: int, frame: FrameType | None) -> None:
    _noted.set()
    if _loads_library(frame):
        _send_later()
    else:
        signal.default_int_handler(number, frame)


def _loads_library(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in LOADS:
            return True
        frame = frame.f_back
    return False


def _send_later() -> None:
    main = threading.main_thread().ident
    timer = threading.Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))
    timer.daemon = True
    timer.start()


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
        _send_later()

    hook.sends_again = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def was_interrupted(error: BaseException | None) -> bool:
    """True for the error of a library in C that was interrupted while it was imported: there is a
    KeyboardInterrupt behind it, or one was noted before."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None or _noted.is_set()
