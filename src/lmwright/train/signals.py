"""Asking a running loop to stop: Ctrl-C, SIGTERM, a lost terminal, or any host's preemption notice.

The first signal asks the loop to save and stop after its step; a second Ctrl-C gives up
at once (the last checkpoint stays). Before the first step there is nothing to save, so that the
first signal ends the process at once, with the same exit code.
"""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType

from lmwright.errors import EXIT_INTERRUPTED

EXIT_PREEMPTED = 42  # a supervisor restarts this without counting a failure
EXIT_SESSION_OVER = 43  # limits.session_hours; the next session goes on
EXIT_TIME_SPENT = 44  # limits.total_hours; nothing goes on until they are raised
EXIT_PEER_LOST = 45  # another process of the run; starting all of them again goes on
EXIT_SKIPPING = 46  # train.max_skipped_steps in a row; another try would end in the same way
EXIT_CORRUPTED = 47  # a device has other bits than its peers; another machine may go on

# Of a terminal that is gone, an ssh session that is cut off.
HANGUP = getattr(signal, "SIGHUP", None)


class StoppedBeforeFirstStep(SystemExit):
    """A stop was requested before there was anything to save."""


class StopRequest:
    """Context manager; `asked()` tells whether to save and stop, the same on all hosts.

    Set `starting` to False before the first step, or at once in a run of several processes, since
    the others would wait for this one.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.starting = True
        self._hung_up, self._asked = False, 0
        self._before: dict[int, object] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> "StopRequest":
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        for number in (signal.SIGINT, signal.SIGTERM, HANGUP):
            if number is None or (
                number == HANGUP and signal.getsignal(number) is signal.SIG_IGN  # as nohup does
            ):
                continue
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread: the caller handles signals
                pass
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._leave_terminal()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is not None and issubclass(kind, StoppedBeforeFirstStep):
            text = "lmwright: stopped before the first step; run the same command again to continue"
            print(text, file=sys.stderr)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.exit_code == EXIT_INTERRUPTED
        if number == HANGUP:
            self._hung_up = True
            self._leave_terminal()
        # first: what is raised in a callback of the collector, Python drops
        interrupted = again or number == signal.SIGINT
        self.exit_code = EXIT_INTERRUPTED if interrupted else EXIT_PREEMPTED
        if number == signal.SIGINT and (self.starting or again):
            raise KeyboardInterrupt
        if self.starting:
            raise StoppedBeforeFirstStep(self.exit_code)

    def _leave_terminal(self) -> None:
        """Silences output to a terminal that is gone, whose errors would prevent the save. The
        signal may come a moment before it is gone, so this is asked again after each step."""
        for fd in self._terminals:
            if self._hung_up and not os.isatty(fd):
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)

    def asked(self, late: Callable[[], bool] = lambda: False) -> bool:
        """True if the loop should stop now, on which all hosts agree: they ask equally often, in
        a step and between the batches of an evaluation. Of several hosts, one whose next rows are
        `late` keeps all of them here: in the step they could not be told to stop."""
        self._leave_terminal()
        import jax

        if jax.process_count() == 1:
            return self.exit_code is not None
        import numpy as np
        from jax.experimental import multihost_utils

        while True:
            self._asked += 1  # a preempted host has all of them stop at the same question
            if multihost_utils.reached_preemption_sync_point(self._asked):
                self.exit_code = self.exit_code or EXIT_PREEMPTED
                return True
            mine = np.array([late(), self.exit_code or 0], np.int32)
            waits, code = multihost_utils.process_allgather(mine).max(axis=0)
            if code:
                self.exit_code = int(code)
            if code or not waits:  # a signal that came meanwhile is for the next question
                return bool(code)
