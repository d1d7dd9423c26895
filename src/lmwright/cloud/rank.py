"""Rank: the process of a job on one host, in a process group of its own."""

import asyncio
import ctypes
import json
import os
import re
import signal
import statistics
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lmwright.cloud.spec import PROGRAM, Limits, Spec
from lmwright.errors import ERROR
from lmwright.guard.heartbeat import STACKS, VARIABLE
from lmwright.guard.parent import DEATH_SIGNAL

REMEMBERED_STEPS = 64
STARTS = 3  # times as long as usual may starting take
MOST_OF_ERROR = 1000  # characters
MOST_OF_TAIL = 20_000  # bytes
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
FRAME = re.compile(r"--- attempt |\s*(@ |#\d|PC: |\*\*\* |File \"|Thread 0x|(0x)?[0-9a-f]{8,16}\b)")


class Rank:
    """One attempt's process on this host."""

    def __init__(self, spec: Spec, host: int, attempt: int, coordinator: str, usual_s: float = 0.0):
        """A rank that starts in `usual_s`, if that is known."""
        self._spec, self.host, self.attempt = spec, host, attempt
        self._beats = spec.folder / "beats" / f"host-{host}.{attempt}"
        self._log = spec.folder / "logs" / f"host-{host}.log"
        self._variables = {
            **os.environ,
            **spec.variables,
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(spec.hosts),
            "JAX_PROCESS_ID": str(host),
            "LMWRIGHT_JOB": spec.name,
            "LMWRIGHT_ATTEMPT": str(attempt),
            VARIABLE: str(self._beats),
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
        }
        program, *words = spec.command
        start = (sys.executable, "-m", PROGRAM) if program == PROGRAM else (program,)
        self._command = *start, *words
        self.pulse = Pulse(spec.limits, usual_s)

    async def start(self) -> None:
        self._at = self._log.stat().st_size if self._log.exists() else 0
        with open(self._log, "ab") as log:
            log.write(f"--- attempt {self.attempt}\n".encode())
            log.flush()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=self._spec.cwd or self._spec.folder,
                env=self._variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    async def wait(self) -> int:
        """Exit code of the process; negative for a signal."""
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Sends a signal to the process; SIGKILL to its whole group."""
        try:
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)
        except ProcessLookupError:
            pass

    def look(self) -> dict[str, Any]:
        """The latest heartbeat, and for how long it has hung beyond its limit."""
        self.pulse.see(_read(self._beats))
        self.pulse.stopped = _is_stopped(self._process.pid)
        return {**self.pulse.facts, "hangs": self.pulse.hangs()}

    def error(self, code: int) -> str:
        """The last line of its output that tells an error, else the last of all. Where the process
        ended itself by a signal, the last lines without stack frames: a runtime that aborts has
        said why before."""
        try:
            with open(self._log, "rb") as log:
                log.seek(max(self._at, log.seek(0, os.SEEK_END) - MOST_OF_TAIL))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:  # somebody has removed it
            return ""
        told = [line.strip() for line in lines if ERROR in line]
        if not told and -code in FROM_OUTSIDE:
            return ""
        told = told or [line.strip() for line in lines if line.strip() and not FRAME.match(line)]
        if code > 0 or (told and ERROR in told[-1]):
            return told[-1][:MOST_OF_ERROR] if told else ""
        return " | ".join(told)[-MOST_OF_ERROR:]

    def keep_stacks(self) -> None:
        """Moves the stacks that SIGUSR1 wrote to the job's folder."""
        stacks = Path(f"{self._beats}{STACKS}")
        if stacks.exists() and stacks.stat().st_size:
            target = self._spec.folder / "stacks" / f"host-{self.host}.{self.attempt}.txt"
            os.replace(stacks, target)

    def clean(self) -> None:
        """Removes what only a running process needs."""
        for path in (self._beats, Path(f"{self._beats}{STACKS}")):
            with suppress(OSError):
                path.unlink()


class Pulse:
    """Judges by heartbeats whether a rank hangs."""

    def __init__(self, limits: Limits, usual_s: float = 0.0):
        """`usual_s` is how long starting took before; 0 if that is not known."""
        self._limits, self._changed = limits, time.monotonic()
        self._usual_s, self._began = usual_s, self._changed
        self.stopped = False
        """True where the system has stopped the process, as SIGSTOP does: it has no reason to be
        silent for long then, whatever it was doing."""
        self.start_s = 0.0
        """How long starting has taken; 0 until it is over."""
        self._steps: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._stepped: tuple[int, float] | None = None
        self.facts: dict[str, Any] = {"beat": 0, "phase": "start", "step": 0, "saved": 0}

    def see(self, facts: dict[str, Any] | None) -> None:
        """Takes a heartbeat that was read."""
        now = time.monotonic()
        if facts is None or facts.get("beat") == self.facts["beat"]:
            return
        if self.facts["phase"] == "start" != facts.get("phase"):
            self.start_s = now - self._began
        if facts.get("phase") == "step":
            if self._stepped is not None and facts["step"] > self._stepped[0]:
                steps = facts["step"] - self._stepped[0]
                self._steps.append((now - self._stepped[1]) / steps)
            self._stepped = facts["step"], now
        self.facts, self._changed = facts, now

    @property
    def limit_s(self) -> float:
        """Seconds that may pass before the next heartbeat."""
        limits, phase = self._limits, self.facts.get("phase")
        if phase == "step":
            median = statistics.median(self._steps) if self._steps else 0.0
            return max(limits.step_floor_s, 5 * median)
        start_s = limits.start_s
        if self._usual_s:
            start_s = min(start_s, max(limits.step_floor_s, STARTS * self._usual_s))
        named = {"start": start_s, "restore": limits.restore_s, "compile": limits.compile_s}
        return named.get(str(phase), limits.beside_s)

    def hangs(self) -> bool:
        """True if the limit has passed."""
        limit_s = min(self.limit_s, self._limits.step_floor_s) if self.stopped else self.limit_s
        return time.monotonic() - self._changed > limit_s


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _die_with_parent() -> None:
    """Asks the kernel, in the child, to end it if its agent is killed."""
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
