"""Heartbeat: a process that trains says where it is, for whoever watches over it.

    $LMWRIGHT_HEARTBEAT   {"beat": 917, "phase": "step", "step": 341, "saved": 300}

The file has one line, which is written again. The watcher looks whether `beat` changes, by its own
clock, so no clocks are compared. SIGUSR1 writes the stacks of all threads beside the file. Without
the variable nothing is written.
"""

import faulthandler
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE = "LMWRIGHT_HEARTBEAT"
STACKS = ".stacks"
BEAT_S = 5.0
WIDTH = 160  # bytes; always as many, so that one write replaces the line

_FACTS: dict[str, Any] = {"beat": 0, "phase": "start", "step": 0, "saved": 0}
_FILES: dict[str, int] = {}


def beat(phase: str, **facts: int) -> None:
    """Says what is being done now: `phase`, and the `step` done or `saved` last."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    if path not in _FILES:
        _FILES[path] = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        stacks = os.open(path + STACKS, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _FACTS.update(facts, phase=phase, beat=_FACTS["beat"] + 1)
    line = json.dumps(_FACTS).ljust(WIDTH - 1) + "\n"
    os.pwrite(_FILES[path], line.encode(), 0)


@contextmanager
def beating(phase: str) -> Iterator[None]:
    """Beats in a thread of its own while another process is waited for, which has heartbeats of
    its own."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(BEAT_S):
            beat(phase)

    beat(phase)
    thread = threading.Thread(target=go_on, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
