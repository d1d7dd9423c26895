"""An enemy of jobs on slices: takes slices away, gives bad ones, lets services fail, and kills the
supervisor, at random. The hosts of a job are played; the service and the bucket are those of the
tests, the supervisor is the user's.

    install --> compile --> step, step, save --> ... --> done        a tick each, or several
"""

import json
import os
import random
import time
import uuid
from collections import Counter
from contextlib import contextmanager

from lmwright.cloud.book import begin, label_of, read_book
from lmwright.cloud.slices import Patience, Slices
from lmwright.cloud.spec import Cloud, Limits, Spec
from lmwright.cloud.tpu_api import ENDPOINT, NO_CREDENTIALS, Tpus
from lmwright.storage.bucket import Bucket
from tests.cloud.fake_tpu import FAULTS, ZONES, FakeTpu
from tests.cloud.played import offer
from tests.storage.fake_gcs import BUCKET

QUICK = Patience(
    poll=0.01, first_word=1.0, silence=1.0, repair=0.3, elsewhere=0.5, stop=1.0, backoff=0.05
)
STEPS, SAVE_EVERY = 12, 3
TICKS = {"install": 2, "compile": 3, "step": 1, "save": 2}
MOST_S = 120.0
TAKEN = ("SUSPENDED", "FAILED", "deleted by hand")
NODES = ({"state": "TERMINATED"}, {"health": "UNHEALTHY_TENSORFLOW"}, {"state": "PREEMPTED"})
BAD = ("silent", "TPU initialization failed", "exit code 47: other bits on host 1")
KINDS = ("preempt",) * 4 + ("node", "bad slice", "bad slice", "api", "api", "bucket", "quota")
KINDS += ("capacity", "supervisor", "supervisor", "slow deletes")


class Killed(BaseException):
    """The supervisor ends at once."""


class Hosts:
    """The hosts of one slice, and the leader among them."""

    def __init__(self, bucket, bad):
        self._bucket, self._bad, self.phase, self._left = bucket, bad, "install", 2
        self._step = self._saved = 0

    def tick(self, now):
        """Does the next piece of work."""
        if self._bad == "silent" or self.phase == "over":
            return
        self._left -= 1
        if self._left <= 0:
            self._finish()
        state = {"status": "running", "attempt": 1, "failures": 0, "error": "", "time": now}
        state |= {"step": self._step, "saved": self._saved}
        if self.phase == "over":
            state["status"] = "done"
        if self._bad and self.phase == "step":
            state |= {"status": "failed", "error": f"rank 0 ended with signal 6: {self._bad}"}
            self.phase = "over"
        if self.phase != "install":
            self._bucket.write("state.json", json.dumps(state))

    def _finish(self):
        if self.phase == "install":
            there = self._bucket.read("state.json")
            self._saved = json.loads(there[0])["saved"] if there else 0
            self._step, self.phase = self._saved, "compile"
        elif self.phase == "save":
            self._saved = self._step
            self.phase = "over" if self._step == STEPS else "step"
        elif self.phase == "compile":
            self.phase = "step"
        else:
            self._step += 1
            self.phase = "save" if self._step % SAVE_EVERY == 0 else "step"
        self._left = TICKS.get(self.phase, 0)


class World:
    """A job, its supervisor and its enemy, all from one seed."""

    def __init__(self, seed, proxy, faults):
        self.rng, self.proxy, self.left = random.Random(seed), proxy, faults
        self.tpu, self.faults, self.problems = FakeTpu(), Counter(), []
        os.environ |= {ENDPOINT: f"http://{self.tpu.server.address}/", NO_CREDENTIALS: "true"}
        zones = self.rng.sample(sorted(ZONES), k=self.rng.randint(1, 2))
        url = f"gs://{BUCKET}/drill-{uuid.uuid4().hex[:8]}"
        self.spec = Spec(
            name="drill", dir=f"{url}/run", command=("train",), hosts=2, port=0,
            url=f"{url}/jobs/drill", limits=Limits(failures=1000),
            cloud=Cloud(project="p", capacity=self.rng.choice(["spot", "on-demand"])),
            offers=tuple(offer(zone) for zone in zones),
        )  # fmt: skip
        begin(self.spec, f"{url}/code/abc", "")
        self.bucket, self.hosts, self.bad = Bucket(self.spec.url), {}, []
        self.told, self._mend, self._kill_at = [], [], None
        self.slices, self.supervisors = self._supervise(), 1

    def _supervise(self):
        return Slices(self.spec, self.told.append, QUICK)

    def run(self):
        """Lets the job run to its end under faults; returns its last state."""
        end, state = time.monotonic() + MOST_S, None
        with self._killing():
            while state is None:
                if time.monotonic() > end:
                    self.problems.append(f"not done in {MOST_S:g} s: {self.told[-5:]}")
                    break
                self._enemy()
                self._tick()
                try:
                    state = self.slices.step()
                except Killed:
                    self.slices.close()
                    self.slices = self._supervise()
                    self.supervisors += 1
                self._look()
                time.sleep(0.002)
        self._mend_all()
        self.slices.close()
        self._judge(state)
        self.tpu.close()
        return state

    def _tick(self):
        """A tick of the hosts of each slice that is there."""
        active = self.tpu.active()
        for key in active:
            if key not in self.hosts:
                self.hosts[key] = Hosts(self.bucket, self.bad.pop() if self.bad else "")
            self.hosts[key].tick(time.monotonic())
        for key in [key for key in self.hosts if key not in active]:
            del self.hosts[key]

    def _look(self):
        """Two requests of one job at a time would be paid for twice."""
        states = {key: r["state"]["state"] for key, r in list(self.tpu.resources.items())}
        if len([key for key, state in states.items() if state != "DELETING"]) > 1:
            self.problems.append(f"two at once: {states}")

    def _judge(self, state):
        if self.tpu.resources:
            self.problems.append(f"left over: {list(self.tpu.resources)}")
        self.problems += [f"asked for twice: {k}" for k, n in self.tpu.asked.items() if n > 1]
        if state is not None and (state["status"], state["saved"]) != ("done", STEPS):
            self.problems.append(f"the job is {state}")
        book = read_book(self.bucket)
        if open_ := [entry["id"] for entry in book["made"] if "ended" not in entry]:
            self.problems.append(f"still paid for in the book: {open_}")
        asked = {id for _, id in self.tpu.asked}
        if asked - {entry["id"] for entry in book["made"]}:
            self.problems.append("a request that the book does not know")

    def phase(self):
        """The phase of the job: of its request, or of its hosts."""
        for key, resource in list(self.tpu.resources.items()):
            state = resource["state"]["state"]
            return self.hosts[key].phase if key in self.hosts else state.lower()
        return "nothing"

    def _enemy(self):
        for due, mend in list(self._mend):
            if time.monotonic() > due:
                self._mend.remove((due, mend))
                mend()
        if self.left <= 0 or self.rng.random() > 0.3:
            return
        kind, phase = self.rng.choice(KINDS), self.phase()
        if getattr(self, f"_{kind.replace(' ', '_')}")():
            self.left -= 1
            self.faults[kind, phase] += 1

    def _mend_all(self):
        for _, mend in self._mend:
            mend()
        self._mend = []

    def _for(self, seconds, mend):
        self._mend.append((time.monotonic() + seconds, mend))
        return True

    def _preempt(self):
        if not self.tpu.resources:
            return False
        zone, id = self.rng.choice(sorted(self.tpu.resources))
        if (state := self.rng.choice(TAKEN)) in TAKEN[:2]:
            self.tpu.preempt(zone, id, state)
        else:
            self.tpu.resources.pop((zone, id))
        return True

    def _node(self):
        if not (active := self.tpu.active()):
            return False
        for node in self.tpu.nodes[self.rng.choice(active)].values():
            node.update(self.rng.choice(NODES))
        return True

    def _bad_slice(self):
        self.bad.append(self.rng.choice(BAD))
        return True

    def _api(self):
        """A burst of faults of one kind, or of all."""
        left, share = self.rng.randint(1, 8), self.rng.choice([0.5, 1.0])
        kinds = [*(set(FAULTS) - {"400"}), "reset", "lost"]

        def draw(method, _kind):
            nonlocal left
            if left <= 0 or self.rng.random() > share:
                return None
            left -= 1
            return self.rng.choice([*kinds, "400", "400"] if method == "DELETE" else kinds)

        self.tpu.faults = draw
        return True

    def _bucket(self):
        faults = type(self.proxy.faults)
        self.proxy.faults = faults(1.0, kinds=("503", "reset"), most=self.rng.randint(1, 2))
        return True

    def _quota(self):
        if not any("active" in entry for entry in read_book(self.bucket)["made"]):
            return False  # the first refusal is told to the user, who is there
        zone = self.rng.choice(self.spec.offers).zone
        self.tpu.quota[zone] = False
        return self._for(0.3, lambda: self.tpu.quota.update({zone: True}))

    def _capacity(self):
        zone = self.rng.choice(self.spec.offers).zone
        self.tpu.stuck.add(zone)
        return self._for(0.7, lambda: self.tpu.stuck.discard(zone))

    def _slow_deletes(self):
        self.tpu.slow_deletes = self.rng.randint(1, 5)
        return True

    def _supervisor(self):
        """Kills the supervisor at its next call of one kind, before or after that is done."""
        self._kill_at = self.rng.choice(["write", "create", "create", "delete", "request"])
        return True

    @contextmanager
    def _killing(self):
        places = [(Bucket, "write"), (Tpus, "create"), (Tpus, "delete"), (Tpus, "request")]
        before = [getattr(owner, name) for owner, name in places]
        for (owner, name), call in zip(places, before, strict=True):
            setattr(owner, name, self._wrapped(call))
        try:
            yield
        finally:
            for (owner, name), call in zip(places, before, strict=True):
                setattr(owner, name, call)

    def _wrapped(self, call):
        def wrapper(this, *args, **options):
            ours = isinstance(this, Tpus) or args[0] == "slices.json"
            if self._kill_at != call.__name__ or not ours:
                return call(this, *args, **options)
            self._kill_at = None
            if self.rng.random() < 0.5:
                call(this, *args, **options)
            raise Killed

        return wrapper


def drill(seed, proxy, faults):
    """Plays one seed; returns its world."""
    world = World(seed, proxy, faults)
    assert label_of(world.spec).startswith("drill-")
    world.run()
    return world
