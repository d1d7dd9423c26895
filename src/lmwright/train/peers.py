"""Peers: messages for a process of the run that never comes, or is lost.

JAX ends the survivors of a lost process by abort(), in a thread of its own, after some hundred
lines of stack. Here these lines go to a log file, and the abort becomes one sentence and an exit
code of its own.
"""

import atexit
import ctypes
import os
import re
import signal
import sys
import tempfile
import threading
import time
from types import TracebackType
from typing import Any

from lmwright.errors import TransientError, UserError
from lmwright.train.signals import EXIT_PEER_LOST

HEARTBEAT_S = 30  # a process that is not heard of for so long is lost
JOIN_S = 300  # all must have come by then
LEAVE_S = 10  # within which all have the same error
FIRST_NOTE_S = 15.0
NOTE_EVERY_S = 60.0

# What a collective, a save or a barrier says before JAX itself notices.
SAID_OF_LOST = re.compile(
    r"Gloo|NCCL|closed by peer|Connection reset|Socket closed|[Cc]oordination ?[Ss]ervice"
    r"|UNAVAILABLE|DEADLINE_EXCEEDED|[Hh]eartbeat"
)


class Waiting:
    """Reports now and then that the others have not come, and ends the process if they never do; a
    context manager around joining them."""

    def __init__(self, others: str, where: str):
        self._text, self._where = others, where
        self._came = threading.Event()

    def __enter__(self) -> "Waiting":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._came.set()

    def _watch(self) -> None:
        began, pause = time.monotonic(), FIRST_NOTE_S
        while not self._came.wait(min(pause, max(JOIN_S - (time.monotonic() - began), 0.0))):
            waited = time.monotonic() - began
            if waited >= JOIN_S:
                text = f"error: {self._text} did not come within {JOIN_S} s{self._where}; start"
                _say(f"{text} one process on each host, all with the same settings")
                os._exit(EXIT_PEER_LOST)
            _say(f"waiting for {self._text}{self._where}, {waited:.0f} s of at most {JOIN_S} s")
            pause = NOTE_EVERY_S


def _say(text: str) -> None:
    print(f"lmwright: {text}", file=sys.stderr, flush=True)


class AbortNotice:
    """Turns JAX's abort into a sentence, for the rest of the process."""

    def __init__(self, count: int | None):
        self._count = count
        self._log = tempfile.NamedTemporaryFile(prefix="lmwright-", suffix=".log", delete=False)
        self._terminal = os.dup(2)
        os.dup2(self._log.fileno(), 2)  # XLA and its libraries write there, Python does not:
        sys.stderr = os.fdopen(self._terminal, "w", buffering=1, errors="backslashreplace")
        # Python's own handlers run in the main thread, which waits for the lost process
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
        self._set = ctypes.CDLL(None).signal
        self._set.restype, self._set.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        self._set(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))
        atexit.register(self._forget)

    def _forget(self) -> None:
        if os.path.exists(self._log.name):
            os.unlink(self._log.name)

    def _aborted(self, _number: int) -> None:
        size = os.fstat(self._log.fileno()).st_size
        output = os.pread(self._log.fileno(), size, 0).decode(errors="replace")
        if "JAX distributed service" in output:
            who = lost_peers(output, self._count)
            details = f"; details in {self._log.name}" if os.path.exists(self._log.name) else ""
            text = (
                f"lmwright: error: {who} (ended, hangs or cannot be reached); start all processes "
                f"again to continue from the newest checkpoint{details}\n"
            )
            cursor = "\x1b[?25h" if os.isatty(self._terminal) else ""  # a live display hides it
            os.write(self._terminal, (cursor + text).encode())
            os._exit(EXIT_PEER_LOST)
        os.write(self._terminal, output.encode())
        self._set(signal.SIGABRT, None)  # the default, to which abort() comes next


def lost_peers(message: str, count: int | None = None) -> str:
    """Processes that were lost, according to JAX's coordination service."""
    of = f" of {count}" if count else ""
    silent = re.search(r"stopped sending heartbeats\):\s*((?:\S*?\d+\s*\n)+)", message)
    if silent:
        numbers = [re.findall(r"\d+", line)[-1] for line in silent[1].splitlines()]
        if len(numbers) > 1:
            return f"processes {', '.join(numbers)}{of} were lost"
        return f"process {numbers[0]}{of} was lost"
    if "leader task" in message or "Failed to send RPC to coordination service" in message:
        return f"process 0{of} was lost"
    return f"a process{of} was lost"


def leave(error: BaseException) -> None:
    """Lets the process end soon after an error that the others may not have: at its exit JAX would
    wait minutes for them. The error is printed before."""
    wait_s = 1 if isinstance(error, TransientError) else LEAVE_S  # which is rarely of all
    from orbax.checkpoint import multihost

    try:
        multihost.get_barrier_sync_fn()(key="leave", timeout_ms=1000 * wait_s)
    except Exception:
        code = error.exit_code if isinstance(error, UserError) else 1
        atexit.register(_end, code)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def expect_abort(error: BaseException) -> None:
    """Waits for JAX to notice the lost process that an error reports. Returns if it is another
    error, or if nothing follows."""
    cause: Any = error
    while cause is not None:
        if SAID_OF_LOST.search(str(cause)):
            time.sleep(2 * HEARTBEAT_S)
            return
        cause = cause.__context__
