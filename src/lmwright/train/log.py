"""Log: library output about a failure goes to a file in the run directory.

Orbax logs the tracebacks of all its threads when a save fails or is interrupted; the terminal gets
the one sentence that the run ends with.
"""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

LOG_FILE = "log.txt"


class _ToFile(logging.FileHandler):
    """File handler that stays silent if the file cannot be written: the disk may be full."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, or drops it where the file cannot be opened: an error here would end the
        thread that logs, before it tells its own."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Closes the file and drops what no longer fits on the disk."""
        with suppress(OSError):
            super().close()


@contextmanager
def errors_to_file(folder: Path, process_index: int = 0) -> Iterator[None]:
    """Sends errors of Orbax and of threads to `log.txt` of a run directory; the file appears with
    the first error."""
    name = f"log-{process_index}.txt" if process_index else LOG_FILE
    handler = _ToFile(folder / name, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger, outer, unraisable = logging.getLogger("absl"), sys.excepthook, sys.unraisablehook
    before = logger.handlers[:], logger.propagate, threading.excepthook
    tasks = logging.getLogger("asyncio")  # names a failed write when its task is collected
    tasks_before = tasks.handlers[:], tasks.propagate

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            of_callback(args.exc_type, args.exc_value, args.exc_traceback)

    def of_callback(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        logger.error("beside the main thread", exc_info=(kind, error, trace))

    def late(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if str(error) != "Event loop is closed":  # writes of a failed save that end after it
            outer(kind, error, trace)

    logger.handlers, logger.propagate = [handler], False
    tasks.handlers, tasks.propagate = [handler], False
    # the second is what C++ threads call: no exception of ours gets there from in here
    threading.excepthook, sys.excepthook = of_thread, of_callback

    def dropped(told: Any) -> None:
        if isinstance(told.exc_value, KeyboardInterrupt):
            unraisable(told)  # which may send it again
        else:
            of_callback(told.exc_type, told.exc_value or told.exc_type(), told.exc_traceback)

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        logger.handlers, logger.propagate, threading.excepthook = before
        failed = sys.exc_info()[0] is not None
        sys.excepthook = late if failed else outer
        # the tasks of a failed save may be collected as late as the process ends
        tasks.handlers, tasks.propagate = (
            ([logging.NullHandler()], False) if failed else tasks_before
        )
        sys.unraisablehook = unraisable
        handler.close()
        if failed:
            atexit.register(_silence)


def _silence() -> None:
    """Silences the end of a process whose save has failed: writes that end after it print their
    tracebacks when Python has already forgotten its hooks."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
