"""Workers: processes that make parts, and end with the process that started them."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any


@contextlib.contextmanager
def worker_pool(count: int) -> Iterator[Callable[..., Future]]:
    """A function that lets one of so many processes call a function, which is that of a module."""
    spawn = multiprocessing.get_context("spawn")
    # The pipe's write end lives only here: when it closes, by Ctrl-C or by our death, every
    # worker ends at once; none is left behind to write into a folder that is being resumed.
    watched, lifeline = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, spawn, _start_worker, (watched,))

    def submit(work: Callable[..., Any], *arguments: Any) -> Future:
        with _interrupts_held():
            return pool.submit(work, *arguments)

    try:
        yield submit
        pool.shutdown()
    finally:
        lifeline.close()
        pool.shutdown(cancel_futures=True)
        watched.close()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Lets a Ctrl-C wait while processes start. They inherit that it is blocked: it is for the
    parent, and would end each of them with a traceback, as would a parent that stops half-way."""
    handler, held = signal.getsignal(signal.SIGINT), []
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *told: held.append(told))  # may come by another thread
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


def _start_worker(watched: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        with contextlib.suppress(OSError):
            watched.poll(None)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
