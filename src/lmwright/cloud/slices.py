"""Slices: asks for the slices of a job, watches them, and asks again until the job is over.

    nothing --create--> waiting --ACTIVE--> serving --job over--> deleted
       ^                   |                   |
       +---- deleted <-----+-------------------+   failed, preempted, unhealthy, silent

All that the supervisor knows is in slices.json beside the job, and is written there before a
request is made. So it may be killed at any point: the next one, on any machine, finds the request
and goes on. A claim lets one supervisor act at a time.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmwright.cloud.service import Away, Scarce, Service
from lmwright.cloud.spec import OVER, START, Offer, Spec, dump_spec
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from lmwright.storage.claim import Claim

MADE = "slices.json"
SUPERVISOR = "supervisor"
SUPERVISED = "{url}: the job is supervised by {owner}; stop that supervisor first (Ctrl-C)"
WAITING = {"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING"}
GOING = {"DELETING", "SUSPENDING"}
GOOD_NODES = {"READY", "CREATING", "STARTING", "RESTARTING", "REIMAGING"}
REPAIRED = {"REPAIRING"}
# Failures before the first step that another slice cures, not the user.
BAD_SLICE = (
    "Failed to establish SliceBuilder grpc channel",
    "Unable to initialize backend 'tpu'",
    "TPU initialization failed",
    "Device or resource busy",
    "No TPU devices",
    "chips are missing",
    "libtpu.so already in use",
    "unhealthy or missing",
)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds."""

    poll: float = 15.0
    first_word: float = 1200.0
    """From ACTIVE until the job's leader says anything: installing takes minutes."""
    silence: float = 300.0
    """Without a word from the leader after that."""
    repair: float = 1200.0
    """For the service to replace a slice that is not spot, or to make one healthy."""
    elsewhere: float = 1800.0
    """Waiting in one place before the next offer is tried, where there are several."""
    stop: float = 600.0
    """For a job that was asked to stop."""
    backoff: float = 300.0
    """The longest pause between requests that fail."""


class Slices:
    """The supervisor of a job on TPU slices."""

    def __init__(self, spec: Spec, tell: Callable[[str], None], patience: Patience | None = None):
        """Raises UserError if another supervisor is alive."""
        assert spec.cloud is not None
        self._spec, self._tell, self._patience = spec, tell, patience or Patience()
        self._service, self._bucket = service_of(spec), Bucket(spec.url)
        self._claim = Claim(Bucket(f"{spec.url}/{SUPERVISOR}"), SUPERVISED)
        there = self._bucket.read(MADE)
        self._book: dict[str, Any] = json.loads(there[0]) if there else _EMPTY_BOOK | {"made": []}
        self._since = time.monotonic()
        self._seen: tuple[Any, float] = (None, time.monotonic())
        self._shown = ""
        self._next, self._begin = 0.0, time.monotonic()
        self._stop_since: float | None = None

    def close(self) -> None:
        """Gives the claim back."""
        self._claim.close()

    def run(self) -> dict[str, Any]:
        """Supervises until the job is over and no slice is left; returns the job's state."""
        while True:
            state = self.step()
            if state is not None:
                return state
            time.sleep(self._patience.poll)

    def step(self) -> dict[str, Any] | None:
        """Looks once and does what is due; the job's state once nothing is left to do."""
        self._claim.check()
        try:
            return self._step()
        except Scarce as error:
            self._fail(f"{error}")
        except Away as error:
            self._show(f"{error}; trying again")
        return None

    def _step(self) -> dict[str, Any] | None:
        state = self.state()
        over = state["status"] in OVER and not self._cured_by_another_slice(state)
        current = self._book["current"]
        if over or self._must_end(state):
            if current is not None:
                self._let_go("the job is over" if over else "the job has to end")
                return None
            if not over:
                state = self._close_job(state)
            return state
        if current is None:
            self._ask()
        else:
            self._look_after(current, state)
        return None

    def state(self) -> dict[str, Any]:
        """The job's state as its leader wrote it last."""
        there = self._bucket.read("state.json")
        if there is not None and there[1].generation != self._seen[0]:
            self._seen = there[1].generation, time.monotonic()
        return json.loads(there[0]) if there else dict(START)

    def _ask(self) -> None:
        """Makes the next request; it is written down before, so that it cannot be forgotten."""
        if time.monotonic() < self._next:
            return
        offer = self._spec.offers[self._book["offer"]]
        self._remove_orphans(offer.zone)
        number = len(self._book["made"]) + 1
        id = f"{self._spec.name}-{number}"
        self._book["made"].append({"id": id, "offer": self._book["offer"], "asked": time.time()})
        self._book["current"] = number - 1
        self._write()
        self._say(f"asking for {offer.name} in {offer.zone} ({id})")
        self._create(id, offer)

    def _create(self, id: str, offer: Offer) -> None:
        code = self._book["code"]
        metadata = {
            "lmwright-job": self._spec.url,
            "lmwright-code": code,
            "lmwright-slice": id,
        }
        self._since = self._begin = time.monotonic()  # before, since the answer may be lost
        self._seen = self._seen[0], self._since
        self._service.create(id, self._spec.name, offer, metadata)

    def _remove_orphans(self, zone: str) -> None:
        """Deletes requests of this job that an interrupted launch has left."""
        for request in self._service.requests(zone):
            if request.job == self._spec.name and request.state not in GOING:
                self._say(f"deleting {request.id}, which an earlier launch has left")
                self._service.delete(zone, request.id)

    def _look_after(self, current: int, state: dict[str, Any]) -> None:
        entry = self._book["made"][current]
        offer = self._spec.offers[entry["offer"]]
        request = self._service.request(offer.zone, entry["id"])
        now = time.monotonic()
        doing = f", job {state['status']}" if request.state == "ACTIVE" else ""
        self._show(f"{request.id}: {request.state}{doing}")
        if request.state == "GONE":
            if entry.get("letting_go"):
                self._forget()
            elif "active" not in entry and now - self._since < 2 * self._patience.poll:
                self._create(entry["id"], offer)  # interrupted before the request was made
            else:
                self._lost("it was deleted by somebody")
            return
        if request.state in GOING or entry.get("letting_go"):
            self._let_go(entry.get("letting_go") or "it is being taken away")
        elif request.state in ("SUSPENDED", "FAILED"):
            self._lost(f"it is {request.state} {request.message}".rstrip())
        elif request.state == "HOPELESS":
            self._give_up(state, request.message)
        elif request.state in WAITING and "active" not in entry:
            self._wait(now)
        else:
            self._serve(entry, offer, state, now)

    def _wait(self, now: float) -> None:
        """Goes to the next offer after a while, if there are several."""
        if len(self._spec.offers) > 1 and now - self._since > self._patience.elsewhere:
            self._book["offer"] = (self._book["offer"] + 1) % len(self._spec.offers)
            self._lost("there is no capacity yet; trying the next offer")

    def _serve(
        self, entry: dict[str, Any], offer: Offer, state: dict[str, Any], now: float
    ) -> None:
        """Watches a slice that is there."""
        patience = self._patience
        if "active" not in entry:
            entry |= {"active": time.time(), "step": state["step"]}
            self._since, self._seen = now, (self._seen[0], now)
            self._write()
        nodes = self._service.nodes(offer.zone, entry["id"], offer.num_slices)
        bad = [n for n in nodes if n.state not in GOOD_NODES or n.health.startswith("UNHEALTHY")]
        replaced = self._service.cloud.capacity != "spot"
        if not bad and len(nodes) == offer.num_slices:
            self._begin = now
        else:
            reason = ", ".join(f"{n.name} is {n.state} {n.health}" for n in bad) or "a node is gone"
            repairing = all(n.state in REPAIRED or n.state in GOOD_NODES for n in bad)
            if not (replaced or repairing) or now - self._begin > patience.repair:
                self._lost(reason)
                return
            self._since, self._seen = now, (self._seen[0], now)  # its hosts may install again
        spoke = self._seen[1] > self._since
        if now - self._seen[1] > (patience.silence if spoke else patience.first_word):
            self._lost("nothing is heard of its hosts")
        if state["step"] > entry["step"] and self._book["failures"]:
            self._book["failures"] = 0
            self._write()

    def _give_up(self, state: dict[str, Any], reason: str) -> None:
        """Fails the job for a reason that another slice does not cure."""
        self._bucket.write("state.json", json.dumps(state | {"status": "failed", "error": reason}))

    def _lost(self, reason: str) -> None:
        """Gives a slice up; another one is asked for."""
        self._book["failures"] += 1
        self._pause()
        self._let_go(reason)

    def _fail(self, reason: str) -> None:
        """A request was refused for want of quota or capacity."""
        self._say(reason)
        if self._book["current"] is None:
            return
        self._book["made"][self._book["current"]]["ended"] = time.time()
        self._book["offer"] = (self._book["offer"] + 1) % len(self._spec.offers)
        self._book |= {"current": None, "failures": self._book["failures"] + 1}
        self._pause()
        self._write()

    def _pause(self) -> None:
        failures = max(0, self._book["failures"] - 1)
        pause = min(self._patience.poll * 2.0 ** min(failures, 20), self._patience.backoff)
        self._next = time.monotonic() + (pause if failures else 0.0)

    def _let_go(self, reason: str) -> None:
        """Deletes the slice; forgets it once it is gone."""
        entry = self._book["made"][self._book["current"]]
        zone = self._spec.offers[entry["offer"]].zone
        if "letting_go" not in entry:
            entry["letting_go"] = reason
            self._say(f"{entry['id']}: {reason}; deleting it")
            self._write()
        request = self._service.request(zone, entry["id"])
        if request.state == "GONE":
            self._forget()
        elif request.state != "DELETING":
            self._service.delete(zone, entry["id"])

    def _forget(self) -> None:
        self._book["made"][self._book["current"]]["ended"] = time.time()
        self._book["current"] = None
        self._write()

    def _cured_by_another_slice(self, state: dict[str, Any]) -> bool:
        """A job that failed because its slice is bad starts again on another; at most as often as
        it may fail."""
        if state["status"] != "failed" or not any(word in state["error"] for word in BAD_SLICE):
            return False
        if self._book["bad_slices"] >= self._spec.limits.failures:
            return False
        self._book["bad_slices"] += 1
        self._bucket.write("state.json", json.dumps(state | {"status": "starting", "failures": 0}))
        if self._book["current"] is not None:
            self._lost(f"a bad slice: {state['error']}")
        return True

    def _must_end(self, state: dict[str, Any]) -> bool:
        """True once a stop or a spent budget has had its time to save."""
        asked = self._bucket.entry("stop") is not None
        if not asked and (spent := self._spent()):
            self._say(f"{spent}; the job saves and ends")
            self._bucket.write("stop", spent)
            asked = True
        if not asked:
            return False
        now = time.monotonic()
        self._stop_since = self._stop_since or now
        current = self._book["current"]
        serving = current is not None and "active" in self._book["made"][current]
        return not serving or now - self._stop_since > self._patience.stop

    def _spent(self) -> str:
        """Which limit is reached; empty if none is."""
        cloud = self._service.cloud
        used = usage(self._spec, self._book)
        for name, word in (("hours", "h"), ("chip_hours", "chip-hours"), ("cost", "USD")):
            limit = getattr(cloud, f"max_{name}")
            if limit and used[name] >= limit:
                return f"the limit of {limit:g} {word} is reached"
        return ""

    def _close_job(self, state: dict[str, Any]) -> dict[str, Any]:
        there = self._bucket.read("stop")
        reason = there[0].decode() if there else ""
        state |= {"status": "stopped", "error": reason or "stopped as asked"}
        self._bucket.write("state.json", json.dumps(state))
        return state

    def _show(self, text: str) -> None:
        """Says what has not been said last."""
        if text != self._shown:
            self._shown = text
            self._say(text)

    def _say(self, text: str) -> None:
        self._tell(text)
        self._book["events"] = [*self._book["events"], [time.time(), text]][-1000:]

    def _write(self) -> None:
        self._bucket.write(MADE, json.dumps(self._book))


_EMPTY_BOOK: dict[str, Any] = {
    "made": [],
    "current": None,
    "offer": 0,
    "failures": 0,
    "bad_slices": 0,
    "code": "",
    "events": [],
}


def begin(spec: Spec, code: str, run_file: str) -> None:
    """Writes a job into its bucket. Raises UserError if the name is taken there."""
    bucket = Bucket(spec.url)
    if bucket.read("job.json") is not None:
        raise UserError(
            f"--name: there is a job {spec.url} already; choose another name, or take it up: "
            f"lmwright jobs follow {spec.url}"
        )
    bucket.write("run.toml", run_file)
    bucket.write(MADE, json.dumps(_EMPTY_BOOK | {"code": code}))
    bucket.write("job.json", dump_spec(spec))


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


def service_of(spec: Spec) -> Service:
    """The service that has the slices of a job."""
    assert spec.cloud is not None
    if spec.cloud.gke is not None:
        from lmwright.cloud.gke.cluster import Cluster

        return Cluster(spec.cloud, spec.url)
    from lmwright.cloud.tpu_api import Tpus

    return Tpus(spec.cloud)
