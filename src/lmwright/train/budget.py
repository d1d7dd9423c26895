"""Budget: the machine time of a run, over all its sessions.

    sessions.json  [{"began": ..., "seconds": ..., "first_step": ..., "last_step": ...,
                     "step_s": ..., "save_s": ..., "end": "session limit",
                     "spent": {"start": ..., "compile": ..., "step": ..., ...},
                     "devices": {"kind": ..., "count": ...},
                     "slice": {"chips": ..., "price": ..., ...}}, ...]

Every session adds its entry and keeps it up to date, so that a killed one counts too. Before
each step the loop asks whether there is time for it, see `planner.sessions`.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from lmwright.config.run import Limits, Run
from lmwright.core.param import Tree
from lmwright.core.weight import nbytes
from lmwright.errors import UserError
from lmwright.guard.files import write_whole
from lmwright.planner.sessions import assumed_save_s, fits, session_limit_s
from lmwright.report.ledger import DEVICES, KILLED, LEDGER, SPENT, is_number
from lmwright.report.paid import FACTS, slice_of_host
from lmwright.train.signals import EXIT_SESSION_OVER, EXIT_TIME_SPENT

REMEMBERED_STEPS = 20
PARTS = ("start", "compile", "step", "input", "evaluate", "save")
WRITE_EVERY_S = 30.0
NUMBERS = ("began", "seconds", "first_step", "last_step", "step_s", "save_s")


class Budget:
    """The clock of one session and the ledger of all.

    `began` is the clock's time at which the session's machine time began; now if unset. The clock
    must not follow the time of day, which is set back and forth. `checkpoint_bytes` stand for the
    time of a save until one was measured.
    """

    def __init__(
        self,
        limits: Limits,
        run_dir: Path,
        start_step: int,
        *,
        checkpoint_bytes: int = 0,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limits, self._path, self._clock = limits, run_dir / LEDGER, clock
        self._began = clock() if began is None else began
        self.earlier = read_ledger(self._path)
        measured = [entry["save_s"] for entry in self.earlier if entry.get("save_s")]
        self._save_s = measured[-1] if measured else assumed_save_s(checkpoint_bytes)
        self._steps_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._other_s = 0.0
        self._spent = dict.fromkeys(PARTS, 0.0) | {"start": max(clock() - self._began, 0.0)}
        self._last = clock()
        self._written = float("-inf")
        self._lock = threading.Lock()
        self._entry: dict[str, Any] = {
            "began": round(time.time() - self.used_s, 3),
            "seconds": 0.0,
            "first_step": start_step,
            "last_step": start_step,
            "end": KILLED,
            DEVICES: {"kind": jax.devices()[0].device_kind, "count": jax.device_count()},
        }
        if (facts := slice_of_host()) is not None:
            self._entry[FACTS] = facts

    @classmethod
    def of(cls, run: Run, folder: Path, start: int, state: Tree, began: float) -> "Budget":
        """Budget of a session that continues a run at step `start` with a state."""
        size = nbytes(state)
        return cls(run.limits, folder, start, checkpoint_bytes=size, began=began)

    @property
    def used_s(self) -> float:
        """Seconds of this session so far."""
        return self._clock() - self._began

    @property
    def total_s(self) -> float:
        """Seconds of all sessions so far."""
        return self.used_s + sum(entry["seconds"] for entry in self.earlier)

    @property
    def step_s(self) -> float:
        """The longest of the latest steps; 0 before any."""
        return max(self._steps_s, default=0.0)

    @contextmanager
    def apart(self, part: str) -> Iterator[None]:
        """Context in which time belongs to no step, but to another of `PARTS`; it is written down
        meanwhile, as compilation may take long and be killed."""
        start, ended = self._clock(), threading.Event()
        writer = threading.Thread(target=self._keep_writing, args=(ended,), daemon=True)
        writer.start()
        try:
            yield
        finally:
            ended.set()
            writer.join()
            seconds = self._clock() - start
            self._other_s += seconds
            self._spent[part] += seconds

    def stepped(self, step: int, waited_s: float = 0.0) -> None:
        """Records that a step is done, and how long it waited for its rows."""
        now = self._clock()
        seconds = max(now - self._last - self._other_s, 0.0)
        self._steps_s.append(seconds)
        self._spent["input"] += min(waited_s, seconds)
        self._spent["step"] += max(seconds - waited_s, 0.0)
        self._last, self._other_s = now, 0.0
        self._entry["last_step"] = step
        if now - self._written >= WRITE_EVERY_S:
            self._write()

    def saved(self, seconds: float) -> None:
        """Records the total seconds of a save."""
        self._save_s = seconds
        self._entry["save_s"] = round(seconds, 3)

    def over(self, beside_s: float = 0.0) -> int | None:
        """Exit code if there is no time left for one more step, `beside_s` seconds that go with it,
        and a save; otherwise None."""
        next_s = self.step_s + beside_s
        if self._limits.total_hours is not None:
            limit = self._limits.total_hours * 3600 - self._limits.margin_minutes * 60
            if not fits(self.total_s, next_s, self._save_s, limit):
                return EXIT_TIME_SPENT
        if not fits(self.used_s, next_s, self._save_s, session_limit_s(self._limits)):
            return EXIT_SESSION_OVER
        return None

    def close(self, end: str) -> None:
        """Records how the session ended."""
        self._entry["end"] = end
        self._write()

    def _keep_writing(self, ended: threading.Event) -> None:
        wait_s = WRITE_EVERY_S - (self._clock() - self._written)
        while not ended.wait(max(wait_s, 0.0)):
            wait_s = WRITE_EVERY_S
            with suppress(OSError):  # which the next step reports
                self._write()

    def _write(self) -> None:
        with self._lock:
            self._write_entry()

    def _write_entry(self) -> None:
        self._written = self._clock()
        self._entry["seconds"] = max(self._entry["seconds"], round(self.used_s, 3))
        self._entry[SPENT] = {name: round(value, 3) for name, value in self._spent.items()}
        if self._steps_s:
            self._entry["step_s"] = round(self.step_s, 6)
        if jax.process_index() == 0:
            entries = [*self.earlier, self._entry]
            write_whole(self._path, json.dumps(entries, indent=1) + "\n")


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Sessions of a run so far; each entry has `seconds`, from 0.

    A damaged ledger must not keep a run from continuing: what can be read of it counts, which
    is told, and the file as it was is kept beside it. Raises UserError where it cannot be opened.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); move it elsewhere") from error
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    entries = [_repair(entry) for entry in value] if isinstance(value, list) else []
    sessions = [entry for entry in entries if entry is not None]
    if sessions != value and jax.process_index() == 0:
        aside = path.with_name(f"{path.name}.damaged")
        aside.write_bytes(data)
        hours = sum(entry["seconds"] for entry in sessions) / 3600
        print(
            f"{path}: is damaged; {len(sessions)} sessions of {hours:.2g} hours are counted, and "
            f"the old file is now {aside.name}"
        )
    return sessions


def _repair(entry: Any) -> dict[str, Any] | None:
    """Session entry without impossible values; None for an entry that is not a session."""
    if not isinstance(entry, dict):
        return None
    session = {
        name: value for name, value in entry.items() if name not in NUMBERS or is_number(value)
    }
    if "seconds" not in session:  # at least those of its steps
        steps = session.get("last_step", 0) - session.get("first_step", 0)
        session["seconds"] = max(steps, 0) * session.get("step_s", 0.0)
    return session
