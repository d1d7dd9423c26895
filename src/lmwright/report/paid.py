"""Queue, chip-hours and cost of a run on slices, by the facts that its sessions carry.

    slices.json --host--> $LMWRIGHT_SLICE_COST --session--> sessions.json --> chip-hours, USD

Each session knows its own slice and all that its job had before. So a slice on which nothing was
trained counts too, and so does the time in which one was there and not training.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmwright.report.ledger import is_number

VARIABLE = "LMWRIGHT_SLICE_COST"
FACTS = "slice"
"""Key of a session; {"job", "chips", "price", "active", "queue_s", "earlier": [...]}, where an
earlier slice has {"chips", "price", "paid_s", "queue_s"}."""
HOUR_S = 3600.0


@dataclass(frozen=True)
class Paid:
    """Sums over all slices of a run."""

    seconds: float
    """Time from the moment that a slice was there until it was given back, or last trained on."""
    training_s: float
    """Time of that in training sessions."""
    queue_s: float
    chip_hours: float
    cost: float
    """Cost in USD by the list price."""


def slice_of_host() -> dict[str, Any] | None:
    """Facts of the slice that this process runs on; None elsewhere."""
    try:
        return parse_facts(json.loads(os.environ.get(VARIABLE, "null")))
    except ValueError:
        return None


def parse_facts(value: Any) -> dict[str, Any] | None:
    """Facts without what is damaged; None if they are not facts of a slice."""
    if not isinstance(value, dict) or not isinstance(value.get("job"), str):
        return None
    earlier = value.get("earlier")
    numbers = _numbers(value, ("chips", "price", "active", "queue_s"))
    before = [_numbers(entry, ("chips", "price", "paid_s", "queue_s")) for entry in
              (earlier if isinstance(earlier, list) else [])]  # fmt: skip
    if numbers is None or None in before:
        return None
    return {"job": value["job"], **numbers, "earlier": before}


def _numbers(value: Any, names: Sequence[str]) -> dict[str, float] | None:
    if not isinstance(value, dict):
        return None
    numbers = {name: value.get(name) for name in names}
    return numbers if all(map(is_number, numbers.values())) else None  # type: ignore[return-value]


def paid(sessions: Sequence[dict[str, Any]]) -> Paid | None:
    """Sums over the slices of some sessions; None where no session ran on one."""
    last: dict[str, tuple[dict[str, Any], float]] = {}
    training = 0.0
    for entry in sessions:
        if (facts := parse_facts(entry.get(FACTS))) is not None:
            training += entry["seconds"]
            last[facts["job"]] = facts, entry["began"] + entry["seconds"]
    if not last:
        return None
    seconds = queue = chip_hours = cost = 0.0
    for facts, end in last.values():
        now = facts | {"paid_s": max(end - facts["active"], 0.0)}
        for entry in (*facts["earlier"], now):
            seconds += entry["paid_s"]
            queue += entry["queue_s"]
            chip_hours += entry["paid_s"] / HOUR_S * entry["chips"]
            cost += entry["paid_s"] / HOUR_S * entry["chips"] * entry["price"]
    return Paid(max(seconds, training), training, queue, chip_hours, cost)
