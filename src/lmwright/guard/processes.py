"""Processes that are known by their number, and recognized by when they began: numbers are used
again."""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

TIME_OF_DAY = 1e9  # no machine runs for so many seconds


def start_of(pid: int) -> float | None:
    """Start of a process in seconds from the machine's boot, which stays when the clock is set;
    None where there is no such process. Where the system does not say, the time of day."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    with suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return None


def age_s(pid: int) -> float:
    """Seconds since a process began. The time of day of its start would be up to a second early:
    the system tells that of its own start in whole seconds."""
    start = start_of(pid)
    if start is None:
        return 0.0
    now = time.time() if start > TIME_OF_DAY else time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(now - start, 0.0)


def began_at(pid: int, start: float) -> bool:
    """True if a process with this number is there that began then: by `start_of`, or by the time of
    day as earlier versions noted it."""
    now = start_of(pid)
    if now is not None and start > TIME_OF_DAY > now:
        with suppress(psutil.Error):
            now = psutil.Process(pid).create_time()
    return now is not None and abs(now - start) < 1
