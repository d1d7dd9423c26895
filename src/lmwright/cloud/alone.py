"""Alone: what a slice does that nobody supervises: it keeps to its job's budget, and deletes itself
once it has nothing left to do.

    job over or forgotten             deleted after `limits.alone_s`
    leader silent                     deleted after three times as long: its host is dead
    budget spent                      the job is asked to stop, as its supervisor would do
"""

import asyncio
import json
import time
from typing import Any

from lmwright.cloud import metadata
from lmwright.cloud.book import read_book, spent, usage
from lmwright.cloud.identity import HostIdentity
from lmwright.cloud.service import Away, Service
from lmwright.cloud.spec import OVER, Cloud, Limits, Spec
from lmwright.cloud.times import began_serving
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket

POLL_S = 30.0
SILENT = 3  # times `alone_s`
DELETE_S = 3600.0


class Ended(Exception):
    """There is nothing for this host to do; its text says why. With `at_once`, its slice need not
    wait for a supervisor to delete it."""

    def __init__(self, reason: str, *, at_once: bool = False):
        super().__init__(reason)
        self.at_once = at_once


def state_of(bucket: Bucket) -> tuple[dict[str, Any], int] | None:
    """State of a job and its generation; None for a job that no longer exists."""
    if bucket.entry("job.json") is None:
        return None
    there = bucket.read("state.json")
    return ({"status": ""}, 0) if there is None else (json.loads(there[0]), there[1].generation)


async def watch(spec: Spec, identity: HostIdentity, host: int) -> None:
    """Looks after the slice from within; raises Ended where its work here is over."""
    bucket, began = Bucket(spec.url), time.time()
    seen, heard, over = -1, time.monotonic(), 0
    while True:
        await asyncio.sleep(min(POLL_S, spec.limits.alone_s))
        try:
            there = await asyncio.to_thread(state_of, bucket)
            if host == 0:
                await asyncio.to_thread(_keep_to_budget, spec, identity, bucket, began)
        except UserError:
            heard = time.monotonic()  # nobody can be heard
            continue
        if there is None:
            raise Ended("the job was forgotten")
        state, generation = there
        over = over + 1 if state["status"] in OVER else 0
        if over > 1:  # the leader had time to say so itself
            raise Ended(f"the job is {state['status']}")
        if generation != seen:
            seen, heard = generation, time.monotonic()
        elif time.monotonic() - heard > SILENT * spec.limits.alone_s:
            raise Ended("the leader does not report", at_once=True)


def _keep_to_budget(spec: Spec, identity: HostIdentity, bucket: Bucket, began: float) -> None:
    """Asks the job to stop once its budget is spent."""
    assert spec.cloud is not None
    if not (spec.cloud.max_hours or spec.cloud.max_chip_hours or spec.cloud.max_cost):
        return
    book = read_book(bucket)
    for entry in book["made"]:
        if entry["id"] == identity.incarnation and "active" not in entry:  # nobody saw it come
            entry["active"] = began_serving(bucket, entry["id"]) or began
    reached = spent(spec.cloud, usage(spec, book))
    if reached and bucket.entry("stop") is None:
        bucket.write("stop", reached)


async def leave(
    identity: HostIdentity, limits: Limits, reason: str, *, at_once: bool = False
) -> None:
    """Deletes this slice, if it is still there after a while and its job has not begun again.
    Raises SystemExit if it has."""
    print(f"{reason}; this slice deletes itself if nobody else does", flush=True)
    if not at_once:
        await asyncio.sleep(limits.alone_s)
        if await asyncio.to_thread(_goes_on, identity):
            raise SystemExit("the job goes on")
    end = time.monotonic() + DELETE_S
    while True:
        try:
            tpus, zone = _service()
            if tpus.request(zone, identity.incarnation).state == "GONE":
                return
            tpus.delete(zone, identity.incarnation)
        except Away as error:
            if time.monotonic() > end:
                raise
            print(f"{error}; trying again", flush=True)
        await asyncio.sleep(min(POLL_S, limits.alone_s))  # a delete may be refused for now


def _service() -> tuple[Service, str]:
    """The service of this slice, and its zone. Raises Away where the metadata server tells neither,
    nor who this host is: a slice is not to stay for that."""
    from lmwright.cloud.tpu_api import Tpus

    zone = (metadata.read("instance/zone") or "").rpartition("/")[2]
    project = metadata.read("project/project-id")
    if not zone or not project:
        raise Away("the metadata server does not name the project and the zone")
    try:
        return Tpus(Cloud(project=project)), zone
    except UserError as error:
        raise Away(f"{error}") from None


def _goes_on(identity: HostIdentity) -> bool:
    """True if the job is there, not over, and knows this slice as its own."""
    bucket = Bucket(identity.url)
    try:
        there, book = state_of(bucket), read_book(bucket)
    except UserError:
        return False
    known = identity.incarnation in (entry["id"] for entry in book["made"])
    return there is not None and there[0]["status"] not in OVER and known
