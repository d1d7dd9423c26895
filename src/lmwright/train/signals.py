"""Asking a running loop to stop: Ctrl-C, SIGTERM, or any host's preemption notice.

The first signal asks the loop to save and stop after its step; a second Ctrl-C gives up
at once (the last checkpoint stays).
"""

import signal
from types import FrameType

import jax

EXIT_INTERRUPTED = 130
EXIT_PREEMPTED = 42  # a supervisor restarts this without counting a failure
EXIT_SESSION_OVER = 43  # limits.session_hours; the next session goes on
EXIT_TIME_SPENT = 44  # limits.total_hours; nothing goes on until they are raised


class StopRequest:
    """Context manager; `asked(step)` tells whether to save and stop, the same on all hosts."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread: the caller handles signals
                pass
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.exit_code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED

    def asked(self, step: int) -> bool:
        """Whether to stop after this step; with several hosts, all agree on the step."""
        if jax.process_count() == 1:
            return self.exit_code is not None
        import numpy as np
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(step):
            self.exit_code = self.exit_code or EXIT_PREEMPTED
            return True
        codes = multihost_utils.process_allgather(np.int32(self.exit_code or 0))
        self.exit_code = int(codes.max()) or None
        return self.exit_code is not None
