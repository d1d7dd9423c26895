"""Portions of the data that are still being prepared: training waits before a step that needs one.

    step, step, step --rows of portion 4?--> not there: look, beat, look ... --there--> step, step

A wait is ended by a signal or a limit, as a step would be: the state is saved and the session ends.
Every saved state knows the fingerprints of the portions so far, and is continued on no others.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.core.processes import of_all
from lmwright.data.rows.portioned import Portioned
from lmwright.data.rows.store import PortionedStore, TokenStore
from lmwright.errors import UserError
from lmwright.guard.heartbeat import beat
from lmwright.storage.bucket import Bucket, is_bucket
from lmwright.train.hooks import Hook, Running

LOOK_S, LOOK_AWAY_S = 1.0, 10.0  # between looks at a folder, at a bucket
STILL_S = 600.0  # without a change in the portion's folder
KNOWN = "portions"  # in the meta of a state


def waiting(
    stores: Mapping[str, TokenStore],
    meta: Mapping[str, Any],
    facts: dict[str, Any],
) -> tuple[Hook, ...]:
    """The hook of a run whose data is in portions, which are compared with those in the `meta` of
    the state it continues; `facts` are told of them. Raises UserError for portions that differ."""
    portioned = {n: s.portions for n, s in stores.items() if isinstance(s, PortionedStore)}
    for name, store in portioned.items():
        store.expect(meta.get(KNOWN, {}).get(name, []))
    return (PortionWait(portioned, facts),) if portioned else ()


class PortionWait(Hook):
    """Waits for the portions that the next step reads."""

    def __init__(self, stores: Mapping[str, Portioned], facts: dict[str, Any]):
        self._stores, self._facts = stores, facts
        self._sure = dict.fromkeys(stores, -1)
        """The last portion of each store that is known to be there on all hosts."""
        self._write_down()

    def before_step(self, session: Running, step: int) -> bool:
        code = self._wait(session)
        session.stop.exit_code = session.stop.exit_code or code
        return code is None

    def _wait(self, session: Running) -> int | None:
        """Returns None when the rows of the next step are there, or an exit code of one that must
        not be begun."""
        needed = {name: stop for name, stop in self._needed(session) if self._unsure(name, stop)}
        if not needed:
            return None
        watch, code = Still(), None
        with session.paused("input"):
            while True:
                missing = [n for n, stop in needed.items() if not self._stores[n].there(stop)]
                session.stop.asked()
                code = session.stop.exit_code or session.budget.over()
                any_missing, code = _agreed(bool(missing), code)
                if code is not None or not any_missing:
                    break
                beat("wait")
                for name in missing:
                    watch.tell(session, self._stores[name])
                time.sleep(LOOK_AWAY_S if watch.away else LOOK_S)
        if watch.told and code is None:
            session.display.note(f"going on after {watch.waited_s:,.0f} s")
            session.metrics.event("waited for data", step=session.at, seconds=watch.waited_s)
        if code is None:
            self._sure |= {name: self._stores[name].last(stop) for name, stop in needed.items()}
        self._write_down()
        return code

    def _needed(self, session: Running) -> list[tuple[str, int]]:
        """For each store, the row before which the rows of the next step end."""
        return [
            (trainee.name, (session.counts[trainee.name] + 1) * trainee.rows)
            for trainee in session.active
            if trainee.name in self._stores
        ]

    def _unsure(self, name: str, stop: int) -> bool:
        return self._stores[name].last(stop) > self._sure[name]

    def _write_down(self) -> None:
        self._facts[KNOWN] = {name: store.prints for name, store in self._stores.items()}


def _agreed(missing: bool, code: int | None) -> tuple[bool, int | None]:
    """True and a code if that holds for any process of the run; all of them ask together."""
    most = of_all(np.array([int(missing), code or 0], np.int32)).max(axis=0)
    return bool(most[0]), int(most[1]) or None


class Still:
    """Tells what is waited for, and whether anything happens there."""

    def __init__(self) -> None:
        self.told = self.away = False
        self._began = self._changed = self._looked = time.monotonic()
        self._state: object = None

    @property
    def waited_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    def tell(self, session: Running, store: Portioned) -> None:
        """Prints a line at first, and whenever nothing has changed for `STILL_S`."""
        place, run = store.folder(store.finished), session.plan.run
        self.away = "://" in place
        what = f"portion {store.finished + 1} of {store.count}, {place}"
        now = time.monotonic()
        if not self.told:
            self.told = True
            session.display.note(f"waiting for {what}, which `lmwright prepare` makes")
        if now - self._looked < STILL_S / 10:
            return
        self._looked, before = now, self._state
        self._state = _state_of(place)
        if self._state != before:
            self._changed = now
        elif now - self._changed >= STILL_S:
            self._changed = now
            session.display.note(
                f"still waiting for {what}: nothing has changed there for {STILL_S / 60:.0f} "
                f"minutes; run `lmwright prepare {run.dir}/run.toml` if none is running"
            )


def _state_of(place: str) -> object:
    """Something that differs while a folder is being written to."""
    if is_bucket(place):
        with suppress(UserError):
            return {name: entry.generation for name, entry in Bucket(place).entries().items()}
        return None
    sizes = {}
    for path in Path(place).rglob("*") if "://" not in place else ():
        with suppress(OSError):
            sizes[str(path)] = path.stat().st_size
    return sizes
