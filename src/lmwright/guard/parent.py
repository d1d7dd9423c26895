"""A process that ends with the one that started it, however that ends."""

import os
import signal
import sys

VARIABLE = "LMWRIGHT_PARENT"
"""Process that the started one belongs to."""
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, of Linux


def with_parent() -> dict[str, str]:
    """Environment of a process that is to end with this one."""
    return os.environ | {VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """From now on, this process gets SIGTERM when the one that it belongs to has ended."""
    parent = os.environ.pop(VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)
    if str(os.getppid()) != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGTERM)
