"""An end for what a damaged file may make run for ever."""

import contextlib
import signal


class Hangs(BaseException):
    """No `except` of the code that is tested, not even of OSError as for a TimeoutError, takes it
    for a damaged file."""


@contextlib.contextmanager
def time_limit(seconds):
    """Raises Hangs in what is not done by then."""

    def late(*_):
        raise Hangs(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
