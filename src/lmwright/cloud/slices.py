"""Slices: asks for the slices of a job, watches them, and asks again until the job is over.

    nothing --create--> waiting --ACTIVE--> serving --job over--> deleted
       ^                   |                   |
       +---- deleted <-----+-------------------+   failed, preempted, unhealthy, silent

All that the supervisor knows is in the book beside the job, and is written there before a request
is made. So it may be killed at any point: the next one, on any machine, finds the request and goes
on. A claim lets one supervisor act at a time. Services that do not answer are waited for.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmwright.cloud.book import Book, id_of, label_of, spent, usage, waiting_since
from lmwright.cloud.service import Scarce, Service
from lmwright.cloud.spec import OVER, Offer, Spec
from lmwright.cloud.times import fill_in, fill_in_current
from lmwright.cloud.watch import NO_QUOTA, Watch, bad_slice, last_words
from lmwright.errors import TransientError, UserError
from lmwright.storage.bucket import Bucket
from lmwright.storage.claim import Claim

SUPERVISOR = "supervisor"
SUPERVISED = "{url}: the job is supervised by {owner}; stop that supervisor first (Ctrl-C)"
WAITING = {"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING"}
GOING = {"DELETING", "SUSPENDING"}
GOOD_NODES = {"READY", "CREATING", "STARTING", "RESTARTING", "REIMAGING"}
REPAIRED = {"REPAIRING"}
NO_START = (
    "its hosts do not report: check whether their account may read the bucket, and whether hosts "
    "without external addresses have Private Google Access"
)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds that a supervisor waits."""

    poll: float = 15.0
    first_word: float = 1200.0
    """Time from ACTIVE until the job's leader reports anything: installing takes minutes."""
    silence: float = 300.0
    """Time without a report from the leader after that."""
    repair: float = 1200.0
    """Time for the service to replace a slice that is not spot, or to make one healthy."""
    elsewhere: float = 1800.0
    """Time in one place before the next offer is tried, where there are several."""
    stop: float = 600.0
    """Time for a job that was asked to stop."""
    backoff: float = 300.0
    """Longest pause between requests that fail."""


class Slices:
    """The supervisor of a job on TPU slices."""

    def __init__(self, spec: Spec, tell: Callable[[str], None], patience: Patience | None = None):
        """Takes the claim. Raises UserError if another supervisor is alive."""
        assert spec.cloud is not None
        saving = spec.limits.beside_s + spec.limits.grace_s
        self._patience = patience or Patience(stop=max(Patience.stop, saving))
        self._spec, self._tell = spec, tell
        self._service, self._bucket = service_of(spec), Bucket(spec.url)
        self._claim = Claim(Bucket(f"{spec.url}/{SUPERVISOR}"), SUPERVISED)
        try:
            self._book, self._watch = Book(self._bucket), Watch(self._bucket)
        except BaseException:
            self._claim.close()
            raise
        self._facts = self._book.facts
        self._since = self._begin = time.monotonic()
        self._shown = self._trouble = ""
        self._troubles = self._refusals = 0
        self._next = self._rest = 0.0
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
        """Looks once and does what is due; returns the job's state once nothing is left to do.
        Raises UserError for what no waiting cures."""
        self._claim.check()
        if time.monotonic() < self._rest:
            return None
        try:
            self._book.flush()
            state = self._step()
        except TransientError as error:
            self._wait_out(error)
            return None
        if self._troubles:
            self._troubles, self._trouble = 0, ""
            self._say("the services answer again")
        return state

    def _wait_out(self, error: UserError) -> None:
        """Handles a service that does not answer: it is asked again later, and nothing is held
        against hosts that could not be heard."""
        pause = min(self._patience.poll * 2.0 ** min(self._troubles, 20), self._patience.backoff)
        self._troubles += 1
        self._rest = time.monotonic() + pause
        self._watch.forgive()
        self._begin = self._since = time.monotonic()
        text = f"{error}".partition(" (")[0]
        if text != self._trouble:
            self._trouble = text
            self._say(f"{error}; trying again")

    def _step(self) -> dict[str, Any] | None:
        state = self.state()
        for line in self._watch.events():
            self._tell(line)
        over = not self._cured_by_another_slice(state) and state["status"] in OVER
        if over or self._must_end(state):
            if self._book.current is not None:
                self._let_go("the job is over" if over else "the job has to end", state)
            elif not self._swept():
                return state if over else self._close_job(state)
        elif self._book.current is None:
            self._ask(state)
        else:
            self._look_after(self._book.current, state)
        return None

    def state(self) -> dict[str, Any]:
        """The job's state as its leader wrote it last."""
        return self._watch.look()

    def _ask(self, state: dict[str, Any]) -> None:
        """Makes the next request; it is written down before, so that it cannot be forgotten."""
        if time.monotonic() < self._next or self._has_waited(state):
            return
        self._swept()
        offer = self._spec.offers[self._facts["offer"]]
        id = id_of(self._spec, len(self._facts["made"]) + 1)
        entry = {"id": id, "offer": self._facts["offer"], "asked": time.time()}
        self._facts["made"].append(entry | {"request": uuid.uuid4().hex})
        self._facts["current"] = len(self._facts["made"]) - 1
        self._book.write()
        self._say(f"asking for {offer.name} in {offer.zone} ({id})")
        self._create(self._facts["made"][-1], offer, state)

    def _create(self, entry: dict[str, Any], offer: Offer, state: dict[str, Any]) -> None:
        metadata = {
            "lmwright-job": self._spec.url,
            "lmwright-code": self._facts["code"],
            "lmwright-slice": entry["id"],
            "lmwright-request": entry["request"],
        }
        self._since = self._begin = time.monotonic()
        self._watch.start()
        try:
            self._service.create(entry["id"], label_of(self._spec), offer, metadata)
        except Scarce as error:
            self._refused(entry, f"{error}", state)
            return
        entry["created"] = time.time()
        self._book.write()

    def _refused(self, entry: dict[str, Any], reason: str, state: dict[str, Any]) -> None:
        """Handles a request that was refused for lack of quota or capacity."""
        self._say(reason)
        entry["ended"] = time.time()
        self._facts |= {"current": None, "failures": self._facts["failures"] + 1}
        self._pause()
        self._count_refusal(reason, state)
        self._book.write()

    def _count_refusal(self, reason: str, state: dict[str, Any]) -> None:
        """Turns to the next offer. Fails the job where all were refused and it never had a slice;
        a cluster's quota is used by other jobs, and waited for."""
        self._refusals += 1
        self._facts["offer"] = (self._facts["offer"] + 1) % len(self._spec.offers)
        had = any("active" in entry for entry in self._facts["made"])
        if not had and self._service.cloud.gke is None and self._refusals >= len(self._spec.offers):
            cure = "ask for quota there, or name other slices or zones; then: lmwright jobs start"
            self._give_up(state, f"--on: {reason}; {cure} {self._spec.name}")

    def _swept(self) -> bool:
        """Deletes requests of this job that an interrupted launch has left, in all zones; True
        where one was there."""
        found = False
        for zone in dict.fromkeys(offer.zone for offer in self._spec.offers):
            for request in self._service.requests(zone):
                if request.job != label_of(self._spec):
                    continue
                found = True
                if request.state not in GOING:
                    self._say(f"deleting {request.id}, which an earlier launch has left")
                    self._service.delete(zone, request.id)
        return found

    def _look_after(self, entry: dict[str, Any], state: dict[str, Any]) -> None:
        offer = self._spec.offers[entry["offer"]]
        request = self._service.request(offer.zone, entry["id"])
        now = time.monotonic()
        doing = f", job {state['status']}" if request.state == "ACTIVE" else ""
        self._show(f"{request.id}: {request.state}{doing}")
        if request.state == "GONE":
            if entry.get("letting_go"):
                self._forget()
            elif "created" not in entry:
                self._create(entry, offer, state)  # interrupted before the request was made
            elif "active" in entry or now - self._since > 2 * self._patience.poll:
                self._lost("someone deleted it", state)
        elif request.state in GOING or entry.get("letting_go"):
            self._let_go(entry.get("letting_go") or "it is being taken away", state)
        elif request.state == "FAILED" and NO_QUOTA.search(request.message):
            self._count_refusal(f"{offer.name} in {offer.zone}: {request.message}", state)
            self._lost(f"it is FAILED {request.message}", state)
        elif request.state in ("SUSPENDED", "FAILED"):
            self._lost(f"it is {request.state} {request.message}".rstrip(), state)
        elif request.state == "HOPELESS":
            self._give_up(state, request.message)
        elif request.state in WAITING and "active" not in entry:
            self._wait(now, state)
        else:
            self._serve(entry, offer, state, now)

    def _wait(self, now: float, state: dict[str, Any]) -> None:
        """Goes to the next offer after a while, if there are several."""
        if self._has_waited(state):
            return
        if len(self._spec.offers) > 1 and now - self._since > self._patience.elsewhere:
            self._facts["offer"] = (self._facts["offer"] + 1) % len(self._spec.offers)
            self._lost("there is no capacity yet; trying the next offer", state)

    def _has_waited(self, state: dict[str, Any]) -> bool:
        """Fails the job if no slice was to be had for as long as the user wants to wait."""
        hours, since = self._service.cloud.valid_hours, waiting_since(self._facts)
        if not hours or since is None or time.time() - since < hours * 3600:
            return False
        self._give_up(state, f"--valid-hours: there was no slice within {hours:g} h")
        return True

    def _serve(
        self, entry: dict[str, Any], offer: Offer, state: dict[str, Any], now: float
    ) -> None:
        """Watches a slice that is there."""
        patience, watch = self._patience, self._watch
        if "step" not in entry:
            fill_in(entry, self._spec, self._bucket, state, "")
            entry |= {"active": entry.get("active", time.time()), "step": state["step"]}
            self._since = now
            watch.start()
            self._book.write()
        nodes = self._service.nodes(offer.zone, entry["id"], offer.num_slices)
        bad = [n for n in nodes if n.state not in GOOD_NODES or n.health.startswith("UNHEALTHY")]
        replaced = self._service.cloud.capacity != "spot"
        if not bad and len(nodes) == offer.num_slices:
            self._begin = now
        else:
            reason = ", ".join(f"{n.name} is {n.state} {n.health}" for n in bad) or "a node is gone"
            repairing = all(n.state in REPAIRED or n.state in GOOD_NODES for n in bad)
            if not (replaced or repairing) or now - self._begin > patience.repair:
                self._lost(reason, state)
                return
            self._since = now  # its hosts may install again
            watch.start()
        if state["step"] > entry["step"] and self._facts["failures"] + self._facts["bad_slices"]:
            self._facts |= {"failures": 0, "bad_slices": 0}
            self._book.write()
        if watch.spoke and now - watch.heard > patience.silence:
            self._lost("its hosts no longer report", state)
        elif not watch.spoke and now - watch.heard > patience.first_word:
            told = last_words(self._bucket, entry["id"])
            self._bad_start(state, f"its hosts do not start: {told}" if told else NO_START)

    def _bad_start(self, state: dict[str, Any], reason: str) -> None:
        """Gives up a slice whose hosts never spoke, and after several such slices the job."""
        self._facts["bad_slices"] += 1
        if (count := self._facts["bad_slices"]) >= self._spec.limits.failures:
            self._give_up(state, f"{count} slices in a row did no step, the last: {reason}")
        self._lost(reason, state)

    def _give_up(self, state: dict[str, Any], reason: str) -> None:
        """Fails the job for a reason that another slice does not cure."""
        self._watch.write(state | {"status": "failed", "error": reason})

    def _lost(self, reason: str, state: dict[str, Any]) -> None:
        """Gives a slice up; another one is asked for."""
        self._facts["failures"] += 1
        self._pause()
        self._let_go(reason, state)

    def _pause(self) -> None:
        failures = max(0, self._facts["failures"] - 1)
        pause = min(self._patience.poll * 2.0 ** min(failures, 20), self._patience.backoff)
        self._next = time.monotonic() + (pause if failures else 0.0)

    def _let_go(self, reason: str, state: dict[str, Any]) -> None:
        """Deletes the slice; forgets it once it is gone."""
        entry = self._facts["made"][self._facts["current"]]
        zone = self._spec.offers[entry["offer"]].zone
        if "letting_go" not in entry:
            entry["letting_go"] = reason
            self._say(f"{entry['id']}: {reason}; deleting it")
            self._book.write()
        request = self._service.request(zone, entry["id"])
        if "deleted" not in entry:
            fill_in(entry, self._spec, self._bucket, state, request.state)
        if request.state == "GONE":
            self._forget()
        elif request.state != "DELETING":
            entry["deleted"] = True
            self._service.delete(zone, entry["id"])

    def _forget(self) -> None:
        self._facts["made"][self._facts["current"]].setdefault("ended", time.time())
        self._facts["current"] = None
        self._book.write()

    def _cured_by_another_slice(self, state: dict[str, Any]) -> bool:
        """Handles a job that failed because its slice is bad: it starts again on another, at most
        as often as it may fail."""
        reason, current = bad_slice(self._bucket, state), self._book.current
        if not reason:
            return False
        if current is not None and "letting_go" in current:
            return "a bad slice" in current["letting_go"]
        if self._facts["bad_slices"] >= self._spec.limits.failures:
            return False
        self._facts["bad_slices"] += 1
        self._watch.write(state | {"status": "starting", "failures": 0})
        if current is not None:
            self._lost(f"a bad slice: {reason}", state)
        return True

    def _spent(self, state: dict[str, Any]) -> str:
        """Limit that is reached, as text; empty if none is. A slice that was lost while nobody was
        watching counts until then."""
        if spent(self._service.cloud, usage(self._spec, self._facts)):
            words = self._spec, self._bucket, self._facts, state
            fill_in_current(*words, lambda: self._service)
        return spent(self._service.cloud, usage(self._spec, self._facts))

    def _must_end(self, state: dict[str, Any]) -> bool:
        """True once a stop or a spent budget has had its time to save."""
        asked = self._bucket.entry("stop") is not None
        if not asked and (reached := self._spent(state)):
            self._say(f"{reached}; the job saves and ends")
            self._bucket.write("stop", reached)
            asked = True
        if not asked:
            return False
        now = time.monotonic()
        self._stop_since = self._stop_since or now
        current = self._book.current
        serving = current is not None and "active" in current
        return not serving or now - self._stop_since > self._patience.stop

    def _close_job(self, state: dict[str, Any]) -> dict[str, Any]:
        there = self._bucket.read("stop")
        reason = there[0].decode() if there else ""
        state |= {"status": "stopped", "error": reason or "stopped as asked"}
        self._watch.write(state)
        return state

    def _show(self, text: str) -> None:
        """Prints what was not printed last."""
        if text != self._shown:
            self._shown = text
            self._say(text)

    def _say(self, text: str) -> None:
        self._tell(text)
        self._book.note(text)


def service_of(spec: Spec) -> Service:
    """The service that has the slices of a job."""
    assert spec.cloud is not None
    if spec.cloud.gke is not None:
        from lmwright.cloud.gke.cluster import Cluster

        return Cluster(spec.cloud, spec.url)
    from lmwright.cloud.tpu_api import Tpus

    return Tpus(spec.cloud)
