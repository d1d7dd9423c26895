"""Leader: starts all ranks together, ends them together, and decides what comes after.

    all agents there --start--> ranks run --all ended--> done | again | given up
                                   |
          one dies, hangs, or its host is lost: all are killed at once

Ranks that live on when one is gone hang in their next exchange, so nothing is lost by killing
them; the run goes on from its newest checkpoint. The leader runs beside the agent of host 0 and
keeps all it knows in state.json, so that it may be killed too.
"""

import asyncio
import json
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from lmwright.cloud.handshake import admit
from lmwright.cloud.spec import OVER, Spec, read_state, write_state
from lmwright.cloud.stragglers import Stragglers
from lmwright.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from lmwright.train.signals import (
    EXIT_PREEMPTED,
    EXIT_SESSION_OVER,
    EXIT_SKIPPING,
    EXIT_TIME_SPENT,
)

TICK_S = 0.25
WRITE_EVERY_S = 5.0
TELL_EVERY_S = 1.0
LEAVE_S = 30.0
KILLED_S = 30.0  # for an agent to tell that a rank which it killed has ended
TELL_MISSING_S = 60.0
SAVING = ("save", "end")
BEFORE_STEPS = ("start", "restore", "compile")
GOING_ON = ("step", "eval", *SAVING)
TOLD_TO_END = -signal.SIGTERM, 128 + signal.SIGTERM  # of a command that does not know how to save
AGAIN_CODES = (EXIT_PREEMPTED, EXIT_SESSION_OVER, EXIT_INTERRUPTED, *TOLD_TO_END)
ENDED_WELL = (0, *AGAIN_CODES)
FINAL_CODES = (EXIT_USER_ERROR, EXIT_TIME_SPENT, EXIT_SKIPPING)


@dataclass
class _Host:
    writer: asyncio.StreamWriter
    heard: float
    """Time of its last message, by this machine's clock."""
    pulse: dict[str, Any] = field(default_factory=dict)
    notice: str = ""
    """Reason why the host is about to go, for as long as it says so."""


@dataclass
class _Attempt:
    """Ranks that were started together."""

    number: int
    began: float
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Facts of the ranks that have ended, in that order, by host."""
    asked: str = ""
    """Reason why they were asked to save and end; empty if they were not."""
    reason: str = ""
    """Reason why they were killed."""
    in_vain: bool = False
    """True if they were asked before they had anything to save."""
    deadline: float | None = None
    """Time by which all must have ended: by themselves, or once they were killed."""


class Leader:
    """The leader of a job."""

    def __init__(self, spec: Spec):
        self._spec, self._limits = spec, spec.limits
        self._hosts: dict[int, _Host] = {}
        self._state = read_state(spec)
        self._attempt: _Attempt | None = None
        self._next = self._idle = time.monotonic()
        self._missing: list[int] = []
        self._written = self._told = 0.0
        self._stepped = False
        """True once the attempt has done a step."""
        self._news = False
        """True if that, or a checkpoint, is not written yet."""
        self._stragglers = Stragglers()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talks with one agent."""
        host, entry = -1, _Host(writer, time.monotonic())
        try:
            async with asyncio.timeout(10):
                host = await admit(reader, writer, self._spec.token)
            if not 0 <= host < self._spec.hosts:
                return
            if host in self._hosts:  # its end of the old connection broke first
                self._leave(host, "its agent has come a second time")
            self._hosts[host] = entry
            if self._state["status"] in OVER:  # it was not there when the others were told
                self._order("over")
            while line := await reader.readline():
                self._hear(host, entry, json.loads(line))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, TimeoutError):
            pass
        finally:
            if self._hosts.get(host) is entry:
                self._leave(host, "its agent is gone")
            writer.close()

    def _hear(self, host: int, entry: _Host, message: dict[str, Any]) -> None:
        entry.heard = time.monotonic()
        if "pulse" in message:
            entry.pulse, entry.notice = message["pulse"], message.get("notice", entry.notice)
            self._progress(entry.pulse)
            self._stragglers.see(host, entry.pulse)
        elif "notice" in message:
            entry.notice = message["notice"] or "it is told to end"
        elif "ended" in message:
            self._end(host, message["ended"])

    def _progress(self, pulse: dict[str, Any]) -> None:
        step = pulse.get("step") or self._state["step"]
        self._news = self._news or (step != self._state["step"] and not self._stepped)
        self._stepped = self._stepped or step != self._state["step"]
        self._state["step"] = step
        if pulse.get("saved", 0) > self._state["saved"]:
            self._state |= {"saved": pulse["saved"], "failures": 0}
            self._news = True

    @property
    def idle(self) -> bool:
        """True while no rank runs."""
        return self._attempt is None

    async def run(self) -> None:
        """Leads until the job is over."""
        while self._state["status"] not in OVER:
            try:
                self._tick()
            except Exception as error:
                self._note(f"the leader fails: {error!r:.500}")
                raise
            await asyncio.sleep(TICK_S)
        self._order("over")
        end = time.monotonic() + LEAVE_S
        while self._hosts and time.monotonic() < end:  # until they have sent their last output
            await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        now = time.monotonic()
        for number, host in list(self._hosts.items()):
            if now - host.heard > self._limits.silent_s:
                self._leave(number, f"nothing was heard of it for {self._limits.silent_s:g} s")
        if self._attempt is None:
            self._start_if_ready(now)
        else:
            self._look_after(self._attempt, now)
        if now - self._told > TELL_EVERY_S:
            self._told = now
            self._order("alive")
            if slow := self._stragglers.news():
                self._note(slow)
        if now - self._written > (TELL_EVERY_S if self._news else WRITE_EVERY_S):
            self._write()

    def _start_if_ready(self, now: float) -> None:
        if self._stop_asked():
            self._finish("stopped", "stopped as asked")
            return
        missing = [host for host in range(self._spec.hosts) if not self._is_ready(host)]
        if missing:
            self._wait_for(missing, now)
        elif now >= self._next:
            self._missing = []
            self._state["attempt"] += 1
            self._stragglers, self._stepped = Stragglers(), False
            self._attempt = _Attempt(self._state["attempt"], now)
            for host in self._hosts.values():
                host.pulse = {}
            port = _free_port(self._spec.address)
            self._order(
                "start",
                attempt=self._attempt.number,
                coordinator=f"{self._spec.address}:{port}",
            )
            self._write(status="running")

    def _is_ready(self, host: int) -> bool:
        """True for a host that is there and will stay."""
        return host in self._hosts and not self._hosts[host].notice

    def _wait_for(self, missing: list[int], now: float) -> None:
        """Reports hosts that do not come. A slice that stays incomplete costs money, so its job
        ends with words by which its supervisor recognizes a bad slice; other hosts are waited
        for."""
        waited = now - max(self._idle, self._next)
        names = f"hosts {', '.join(map(str, missing))}"
        if self._spec.cloud is not None and waited > self._limits.gather_s:
            self._finish("failed", f"{names}: unhealthy or missing for {waited:.0f} s")
        elif waited > TELL_MISSING_S and missing != self._missing:
            self._missing = missing
            self._note(f"waiting for {names}")

    def _look_after(self, attempt: _Attempt, now: float) -> None:
        if len(attempt.ended) == self._spec.hosts:
            self._decide(attempt)
            return
        late = [number for number in range(self._spec.hosts) if number not in attempt.ended]
        if attempt.reason:
            if attempt.deadline is not None and now > attempt.deadline:
                for number in late:
                    self._leave(number, f"its rank did not die within {KILLED_S:g} s")
            return
        pulses = {number: self._pulse_of(number, attempt) for number in late}
        hanging = [
            f"{number} ({pulse['phase']} {pulse['step']})"
            for number, pulse in pulses.items()
            if pulse.get("hangs")
        ]
        if hanging:
            self._order("dump")
            self._kill(attempt, f"no sign of life from the ranks on hosts {', '.join(hanging)}")
            return
        # A save may take long, and one that is killed was in vain.
        may = SAVING if attempt.ended else GOING_ON
        idle = [number for number, pulse in pulses.items() if pulse.get("phase") not in may]
        if attempt.deadline is not None and now > attempt.deadline and idle:
            who = f"the ranks on hosts {', '.join(map(str, idle))}"
            self._order("dump")
            self._kill(attempt, f"{who} did not end within {self._limits.grace_s:g} s")
            return
        self._ask_to_end(attempt, now)

    def _pulse_of(self, host: int, attempt: _Attempt) -> dict[str, Any]:
        pulse = self._hosts[host].pulse if host in self._hosts else {}
        return pulse if pulse.get("attempt") == attempt.number else {}

    def _ask_to_end(self, attempt: _Attempt, now: float) -> None:
        """Lets all ranks save and end once a stop is asked for, or a host is about to go."""
        notices = [(number, host.notice) for number, host in self._hosts.items() if host.notice]
        if attempt.asked or not (notices or self._stop_asked()):
            return
        attempt.asked = "stop" if self._stop_asked() else "notice"
        attempt.deadline = now + self._limits.grace_s
        if attempt.asked == "notice":
            number, why = notices[0]
            self._note(f"attempt {attempt.number}: host {number}: {why}; all ranks save and end")
        pulses = [self._pulse_of(number, attempt) for number in range(self._spec.hosts)]
        attempt.in_vain = not attempt.ended and all(map(_has_nothing, pulses))
        if attempt.in_vain:
            self._kill(attempt, "there is nothing to save yet")
        else:
            self._order("term")

    def _end(self, host: int, facts: dict[str, Any]) -> None:
        attempt = self._attempt
        if attempt is None or facts["attempt"] != attempt.number or host in attempt.ended:
            return
        self._progress(facts)
        first = all(ended["code"] not in ENDED_WELL for ended in attempt.ended.values())
        attempt.ended[host] = facts | {"after_kill": bool(attempt.reason)}
        if facts["code"] in ENDED_WELL:
            if first and not attempt.reason:  # however long its save took
                attempt.deadline = time.monotonic() + self._limits.grace_s
        elif not attempt.reason:
            self._kill(attempt, _describe(host, facts))

    def _leave(self, host: int, why: str) -> None:
        """Forgets a host, whose agent kills its rank at the latest when it notices that."""
        if (entry := self._hosts.pop(host, None)) is not None:
            entry.writer.close()
        self._lost(host, why)

    def _lost(self, host: int, why: str) -> None:
        attempt = self._attempt
        if attempt is None or host in attempt.ended:
            return
        attempt.ended[host] = {"code": None, "error": why, "after_kill": bool(attempt.reason)}
        if not attempt.reason:
            self._kill(attempt, f"host {host} is lost: {why}")

    def _kill(self, attempt: _Attempt, reason: str) -> None:
        attempt.reason, attempt.deadline = reason, time.monotonic() + KILLED_S
        self._note(f"attempt {attempt.number}: {reason}; all ranks are ended")
        self._order("kill")

    def _decide(self, attempt: _Attempt) -> None:
        """Finishes the job, or sets when the next attempt may start."""
        self._attempt, self._idle = None, time.monotonic()
        codes = {facts["code"] for facts in attempt.ended.values()}
        first = next(iter(attempt.ended.items()))
        if codes == {0}:
            self._finish("done", "")
        elif final := _final(attempt):
            self._finish("failed", final)
        elif self._stop_asked():
            self._finish("stopped", "stopped as asked")
        elif codes <= set(ENDED_WELL) or attempt.in_vain:
            saved = "" if attempt.in_vain else " and saved"
            self._note(f"attempt {attempt.number}: told to end{saved}; starting again")
            self._next = time.monotonic()
            self._write(status="waiting")
        else:
            self._state["failures"] += 1
            failures, error = self._state["failures"], attempt.reason or _describe(*first)
            if failures >= self._limits.failures:
                self._finish("failed", f"{failures} failures in a row, the last: {error}")
                return
            pause = min(2.0 ** (failures - 1) - 1, self._limits.backoff_s)
            self._next = time.monotonic() + pause
            self._write(status="waiting", error=error)

    def _stop_asked(self) -> bool:
        return (self._spec.folder / "stop").exists()

    def _finish(self, status: str, error: str) -> None:
        self._note(f"{status}{': ' + error if error else ''}")
        self._write(status=status, error=error)

    def _order(self, order: str, **facts: Any) -> None:
        line = json.dumps({"order": order, **facts}).encode() + b"\n"
        for host in self._hosts.values():
            try:
                host.writer.write(line)
            except (OSError, RuntimeError):
                continue

    def _note(self, text: str) -> None:
        with suppress(OSError), open(self._spec.folder / "events.log", "a") as events:
            now = datetime.now().astimezone()  # hosts and laptops are in several zones
            events.write(f"{now.isoformat(' ', 'milliseconds')} {text}\n")

    def _write(self, **facts: Any) -> None:
        slow = [host for host, _, _ in self._stragglers.slow()]
        now = {"time": time.time(), "hosts": sorted(self._hosts), "slow_hosts": slow}
        self._state |= facts | now
        self._written, self._news = time.monotonic(), False
        with suppress(OSError):  # a full disk ends no leader; it is written again soon
            write_state(self._spec, self._state)


def _has_nothing(pulse: dict[str, Any]) -> bool:
    """True for a rank that trains and has done no step since what is saved."""
    return (
        pulse.get("beat", 0) > 0
        and pulse["phase"] in BEFORE_STEPS
        and pulse["step"] == pulse["saved"]
    )


def _final(attempt: _Attempt) -> str:
    """Sentence about a rank that no new start helps. Errors that ranks report after one of them was
    lost do not count."""
    for host, facts in attempt.ended.items():
        if facts["code"] in FINAL_CODES and not facts["after_kill"]:
            return _describe(host, facts)
    return ""


def _describe(host: int, facts: dict[str, Any]) -> str:
    """Sentence about a rank that ended."""
    code = facts["code"]
    if code is None:
        return f"host {host} is lost: {facts['error']}"
    cause = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"rank {host} ended with {cause}" + (f": {facts['error']}" if facts["error"] else "")


def _free_port(address: str) -> int:
    """A free port, new for each attempt: what is left of the one before may still hold its own."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return sock.getsockname()[1]
