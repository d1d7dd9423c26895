"""The ledger of a run's sessions, as all that read it know it; `train.budget` writes it.

sessions.json  [{"began": ..., "seconds": ..., "save_s": ..., "spent": {...}, ...}, ...]
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

LEDGER = "sessions.json"
SPENT = "spent"
"""Key of a session's seconds by use."""
DEVICES = "devices"
"""Key of the devices of a session; {"kind", "count"}."""
KILLED = "killed"
"""End of a session that could not write down another one."""
MOST = 1e15  # of any number; NaN and infinity are not below it either


def is_number(value: Any) -> bool:
    """True for what a session can have: a number from 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST


def usual_save_s(sessions: Iterable[Mapping[str, Any]]) -> float | None:
    """Median seconds of a save over the sessions that measured one; None where none did."""
    times_s = [entry.get("save_s") for entry in sessions]
    measured = [float(time_s) for time_s in times_s if time_s and is_number(time_s)]
    return statistics.median(measured) if measured else None
