"""Workers: processes that make parts, and end with the process that started them."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from types import ModuleType
from typing import Any

from lmwright.guard.terminated import terminated_by_exit


@contextlib.contextmanager
def worker_pool(count: int) -> Iterator[Callable[..., Future]]:
    """A function that lets one of so many processes call a function, which is that of a module."""
    spawn = multiprocessing.get_context("spawn")
    # The pipe's write end lives only here: when it closes, by Ctrl-C or by our death, every
    # worker ends at once; none is left behind to write into a folder that is being resumed.
    watched, lifeline = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, spawn, _start_worker, (watched,))

    def submit(work: Callable[..., Any], *arguments: Any) -> Future:
        with _interrupts_held(), _without_main():
            return pool.submit(work, *arguments)

    try:
        with terminated_by_exit():  # the semaphores of a pool are removed
            yield submit
            pool.shutdown()
    finally:
        lifeline.close()
        pool.shutdown(cancel_futures=True)
        watched.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hides the program from processes that start, which would run a script of Python again. What
    they call is in modules."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM wait while processes start, for whom a parent that stops half-way is
    a traceback. They inherit that Ctrl-C is blocked: it is for the parent, and would end each of
    them with another."""
    told = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in told.items() if callable(handler)}
    if not handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[Any, ...]] = []
    for number in handlers:
        signal.signal(number, lambda *told: held.append(told))  # may come by another thread
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            handlers[held[0][0]](*held[0])


def _start_worker(watched: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        with contextlib.suppress(OSError):
            watched.poll(None)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
