"""Ledger: what the supervisor knows of a job's slices, for the sessions of its run."""

import json
import time
from typing import Any

from lmwright.cloud.book import read_book
from lmwright.cloud.spec import Spec
from lmwright.cloud.times import began_serving
from lmwright.report.paid import VARIABLE
from lmwright.storage.bucket import Bucket

REMEMBERED = 100  # slices


def slice_variable(spec: Spec, incarnation: str) -> dict[str, str]:
    """Variable of the ranks with the facts of their slice and of those before it; empty where the
    supervisor has written none."""
    bucket = Bucket(spec.url)
    made: list[dict[str, Any]] = read_book(bucket)["made"]
    ids = [entry["id"] for entry in made]
    if incarnation not in ids:
        return {}
    at, now = ids.index(incarnation), time.time()
    if "active" not in made[at]:  # nobody saw it come; this host may have begun again since
        made[at]["active"] = began_serving(bucket, incarnation) or now
    own = _facts(spec, made[at], now)
    facts = {
        "job": f"{spec.url} {made[0]['asked']:.3f}",
        **{name: own[name] for name in ("chips", "price", "queue_s")},
        "active": made[at]["active"],
        "earlier": [_facts(spec, entry, now) for entry in made[:at]][-REMEMBERED:],
    }
    return {VARIABLE: json.dumps(facts)}


def _facts(spec: Spec, entry: dict[str, Any], now: float) -> dict[str, float]:
    offer = spec.offers[entry["offer"]]
    ended = entry.get("ended", now)
    active = entry.get("active", ended)
    return {
        "chips": offer.num_chips,
        "price": offer.price,
        "queue_s": round(max(active - entry["asked"], 0.0), 3),
        "paid_s": round(max(ended - active, 0.0), 3) if "active" in entry else 0.0,
    }
