"""Times: when a slice was there, also if no supervisor watched it then.

leader.json   since when its first host serves the job
state.json    when its leader spoke last

The service tells neither, so that without them a slice that came and went while nobody was watching
would cost nothing, or would cost until somebody looks.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from lmwright.cloud.service import Service
from lmwright.cloud.spec import OVER, Spec
from lmwright.storage.bucket import Bucket

LEADER = "leader.json"
LOST = ("GONE", "SUSPENDED", "FAILED")
SILENT_S = 300.0  # after which it is asked whether a slice is still there


def began_serving(bucket: Bucket, id: str) -> float | None:
    """Time at which the first host of a slice began; None where it has not."""
    there = bucket.read(LEADER)
    facts = json.loads(there[0]) if there else {}
    return facts.get("began") if facts.get("slice") == id else None


def fill_in(
    entry: dict[str, Any], spec: Spec, bucket: Bucket, state: dict[str, Any], standing: str
) -> None:
    """Adds the times of a slice that nobody saw: `standing` is its state now."""
    now = time.time()
    if "active" not in entry and (began := began_serving(bucket, entry["id"])) is not None:
        entry["active"] = min(began, now)
    if standing in LOST and "active" in entry and "ended" not in entry:
        said = state.get("time", 0.0)
        stayed = spec.limits.alone_s if state["status"] in OVER else 0.0
        entry["ended"] = min(said + stayed, now) if said > entry["active"] else now


def fill_in_current(
    spec: Spec,
    bucket: Bucket,
    book: dict[str, Any],
    state: dict[str, Any],
    service: Callable[[], Service],
) -> None:
    """Adds the times of a book's present slice. The service is asked only if its leader has not
    spoken for a while. Raises UserError where it does not answer."""
    if book["current"] is None:
        return
    entry = book["made"][book["current"]]
    fill_in(entry, spec, bucket, state, "")
    silent = state["status"] in OVER or time.time() - state.get("time", 0.0) > SILENT_S
    if silent and "active" in entry:
        zone = spec.offers[entry["offer"]].zone
        fill_in(entry, spec, bucket, state, service().request(zone, entry["id"]).state)
