"""Book: slices.json of a job, where its supervisor writes down every request before it makes it.

    {"made": [{"id", "offer", "asked", "created", "active", "step", "letting_go",
               "deleted", "ended"}, ...],
     "current": 1, "offer": 0, "failures": 0, "bad_slices": 0, "code", "events", "writer"}

A book is written only over the version that was read before, so that two supervisors never both
make a request.
"""

import hashlib
import json
import time
import uuid
from typing import Any

from lmwright.cloud.spec import OVER, START, Cloud, Spec, dump_spec
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket, Changed
from lmwright.storage.claim import TakenOver

MADE, STATE = "slices.json", "state.json"
MOST_EVENTS = 1000
EMPTY: dict[str, Any] = {
    "made": [],
    "current": None,
    "offer": 0,
    "failures": 0,
    "bad_slices": 0,
    "code": "",
    "events": [],
}


class Book:
    """The book of a job. Raises TakenOver where another process has written in it."""

    def __init__(self, bucket: Bucket):
        self._bucket, self._writer = bucket, uuid.uuid4().hex
        there = bucket.read(MADE)
        self._generation = there[1].generation if there else 0
        self.facts: dict[str, Any] = EMPTY | {"made": [], "events": []}
        self.facts |= json.loads(there[0]) if there else {}
        self._dirty = False

    @property
    def current(self) -> dict[str, Any] | None:
        """The request that is looked after now."""
        number = self.facts["current"]
        return None if number is None else self.facts["made"][number]

    def write(self) -> None:
        """Writes the whole book; where that fails, `flush` does so later."""
        self._dirty = True
        self.facts["writer"] = self._writer
        try:
            entry = self._bucket.write(MADE, json.dumps(self.facts), self._generation)
        except Changed:
            there = self._bucket.read(MADE)
            if there is None or json.loads(there[0]).get("writer") != self._writer:
                raise TakenOver(
                    f"{self._bucket.url}: another supervisor has taken the job over, or it was "
                    "forgotten; see: lmwright jobs list"
                ) from None
            # A write whose answer was lost.
            entry = self._bucket.write(MADE, json.dumps(self.facts), there[1].generation)
        self._generation, self._dirty = entry.generation, False

    def flush(self) -> None:
        """Writes what could not be written before."""
        if self._dirty:
            self.write()

    def note(self, text: str) -> None:
        """Adds an event, which is written with the next change."""
        self.facts["events"] = [*self.facts["events"], [time.time(), text]][-MOST_EVENTS:]


def begin(spec: Spec, code: str, run_file: str) -> None:
    """Writes a job into its bucket. Raises UserError if the name is taken there."""
    bucket = Bucket(spec.url)
    taken = UserError(
        f"--name: there is a job {spec.url} already; choose another name, or continue it: "
        f"lmwright jobs follow {spec.url}"
    )
    texts = {MADE: json.dumps(EMPTY | {"code": code}), "run.toml": run_file}
    before = {name: bucket.entry(name) for name in texts}  # by a launch that was interrupted
    if bucket.entry("job.json") is not None:
        raise taken
    try:
        for name, text in texts.items():
            entry = before[name]
            bucket.write(name, text, entry.generation if entry else 0)
        bucket.write("job.json", dump_spec(spec), 0)
    except Changed:  # by another launch of this name
        raise taken from None


def read_book(bucket: Bucket) -> dict[str, Any]:
    """Facts of a job's book; those of an empty one where there is none."""
    there = bucket.read(MADE)
    return EMPTY | (json.loads(there[0]) if there else {})


def read_job_state(bucket: Bucket) -> dict[str, Any]:
    """State of a job as its leader wrote it last; that of a fresh job where there is none."""
    there = bucket.read(STATE)
    return json.loads(there[0]) if there else dict(START)


def fail_job(bucket: Bucket, error: str) -> None:
    """Writes that a job has failed, unless it is over."""
    state = read_job_state(bucket)
    if state["status"] not in OVER:
        bucket.write(STATE, json.dumps(state | {"status": "failed", "error": error}))


def label_of(spec: Spec) -> str:
    """Label of a job's requests. Other people may have jobs of the same name."""
    if spec.cloud is not None and spec.cloud.gke is not None:
        return spec.name  # a cluster knows its jobs by their URLs
    return f"{spec.name}-{_digest(spec.url)[:8]}"


def id_of(spec: Spec, number: int) -> str:
    """Name of a request, and of its slices; a job that is launched again has others."""
    if spec.cloud is not None and spec.cloud.gke is not None:
        return f"{spec.name}-{number}"
    return f"{spec.name}-{_digest(spec.url + spec.token)[:6]}-{number}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def usage(spec: Spec, book: dict[str, Any]) -> dict[str, float]:
    """Hours with slices, chip-hours and USD (list price) of a job until now."""
    hours = chip_hours = cost = 0.0
    for entry in book["made"]:
        if "active" in entry:
            offer = spec.offers[entry["offer"]]
            lasted = (entry.get("ended", time.time()) - entry["active"]) / 3600
            hours += lasted
            chip_hours += lasted * offer.num_chips
            cost += lasted * offer.num_chips * offer.price
    return {"hours": hours, "chip_hours": chip_hours, "cost": cost}


def spent(cloud: Cloud, used: dict[str, float]) -> str:
    """Limit that is reached, as text; empty if none is."""
    for name, word in (("hours", "h"), ("chip_hours", "chip-hours"), ("cost", "USD")):
        limit = getattr(cloud, f"max_{name}")
        if limit and used[name] >= limit:
            return f"the limit of {limit:g} {word} is reached"
    return ""


def waiting_since(book: dict[str, Any]) -> float | None:
    """Time of the first request without a slice since the last one that got a slice; None where the
    last one got one."""
    since = None
    for entry in reversed(book["made"]):
        if "active" in entry:
            break
        since = entry["asked"]
    return since
