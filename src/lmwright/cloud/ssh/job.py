"""Jobs on machines behind ssh: their agents are kept alive, and their files fetched, from here.

    laptop                              host 0                         host 1
    supervisor ----------ssh----------> far, agent + leader, rank      far, agent, rank
        state, events, logs <---------- state.json, events.log, logs   logs

The job's folder here has the same files as those on the hosts, ssh.json beside them (how the hosts
are reached) and fetched.json (how much was). Without a supervisor the job goes on; an agent that
dies then stays dead until `lmwright jobs follow`.
"""

import base64
import json
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from lmwright.cloud.local import locked
from lmwright.cloud.spec import OVER, RUN_FILE, START, Spec, dump_spec, read_state, write_state
from lmwright.cloud.ssh.far import FACTS
from lmwright.cloud.ssh.hosts import Host
from lmwright.cloud.ssh.line import Access, Line, Unreachable, all_of, every
from lmwright.cloud.tunnel import Tunnel, run_until_interrupted
from lmwright.errors import UserError
from lmwright.guard.files import write_whole
from lmwright.guard.urls import redact_text

FETCHED = "fetched.json"
PLACE = re.compile(r"events\.log|(logs|stacks)/(host|agent)-\d+[\w.-]*", re.ASCII)
LOOK_EVERY_S = 1.0
TEND_S = 20.0
END_S = 5.0
"""Time for agents to end by themselves after their job."""
CALM_S = 60.0
"""Time after which an agent that died before counts as well again."""
LONGEST_PAUSE_S = 60.0


def is_ssh(spec: Spec) -> bool:
    """True for a job on machines behind ssh, where it is supervised and on its hosts."""
    return (spec.folder / FACTS).exists()


def facts_of(hosts: Sequence[Host], access: Access) -> str:
    """The facts in ssh.json of a supervisor."""
    named = [{"name": host.name, "address": host.address} for host in hosts]
    return json.dumps({"hosts": named, "ssh": access.ssh, "python": access.python}, indent=1)


class Fleet:
    """The hosts of a job."""

    def __init__(self, spec: Spec, lines: Sequence[Line]):
        self.spec, self.lines = spec, list(lines)
        self._next = 0.0
        self._pids: dict[int, int] = {}
        self._deaths: dict[int, list[float]] = {}
        self._gone: set[int] = set()
        """Hosts whose agent was not there at the last look."""
        self._silent: dict[int, str] = {}

    def place(self, number: int, line: Line) -> dict[str, Any]:
        """Makes the job's folder on a host; what the leader knew comes from here."""
        if line.placed:
            return {}
        files = {FACTS: json.dumps({"launched_from": socket.gethostname()})}
        with suppress(FileNotFoundError):
            files[RUN_FILE] = (self.spec.folder / RUN_FILE).read_text()
        if number == 0 and (state := read_state(self.spec)) != START:
            files["state.json"] = json.dumps(state)
        line.ask("place", job=dump_spec(self.spec), files=files)
        line.placed = True
        return {}

    def look(self, *, keep: bool) -> list[str]:
        """Looks at all hosts at once and fetches what is new; with `keep`, agents that died are
        started again. Returns what could not be done."""
        if time.monotonic() < self._next and keep:
            return []
        self._next = time.monotonic() + LOOK_EVERY_S
        with locked(self.spec.folder / "ssh.lock"):  # files are added to
            return self._look(keep)

    def _look(self, keep: bool) -> list[str]:
        before = read_state(self.spec)
        if before["status"] in OVER:
            self._pids.clear()
            return []
        fetched = _fetched(self.spec)
        stop = (self.spec.folder / "stop").exists()
        going = keep

        def ask(number: int, line: Line) -> dict[str, Any]:
            if keep and line.rests:
                return {}
            self.place(number, line)
            words = {"keep": going and self._may_start(number), "stop": stop and number == 0}
            try:
                return line.ask(
                    "tend", name=self.spec.name, host=number, at=fetched, within_s=TEND_S, **words
                )
            except UserError:
                line.placed = False  # its folder may be gone
                raise

        answers = every(self.lines[:1], ask)
        if isinstance(first := answers[0], dict) and first:
            going = keep and first["state"]["status"] not in OVER
        answers += every(self.lines[1:], lambda number, line: ask(number + 1, line))
        problems = []
        for number, answer in enumerate(answers):
            if isinstance(answer, UserError):
                problems.append(f"host {number}: {answer}")
            elif answer:
                self._take(answer, fetched)
            self._judge(number, answer, keep)
        if isinstance(first, dict) and first:
            if first["state"]["status"] in OVER:
                left = self._end(END_S)
                self.close()
                problems += left
                for problem in left:
                    self._note(problem)
            if "same_folder" not in first and first["state"] != before:
                write_state(self.spec, first["state"])
        return problems

    def _take(self, answer: dict[str, Any], fetched: dict[str, int]) -> None:
        """Adds what was fetched to the files here."""
        for place, (at, data) in answer.get("news", {}).items():
            if not PLACE.fullmatch(place):  # a host has no business elsewhere
                continue
            new = base64.b64decode(data)
            with open(self.spec.folder / place, "ab") as file:
                file.write(new)
            fetched[place] = at + len(new)
        if answer.get("news"):
            write_whole(self.spec.folder / FETCHED, json.dumps(fetched), mode=0o600)

    def _may_start(self, number: int) -> bool:
        """False for a while after an agent has died several times, and when it is first seen to be
        gone: the first host, which is asked before the others, may not have told that the job is
        over."""
        if number and number in self._pids and number not in self._gone:
            return False
        deaths = self._deaths.get(number, [])
        pause = min(2.0 ** (len(deaths) - 1) - 1, LONGEST_PAUSE_S) if deaths else 0.0
        return not deaths or time.monotonic() >= deaths[-1] + pause

    def _judge(self, number: int, answer: dict[str, Any] | UserError, keep: bool) -> None:
        """Notes a host that is lost or back, and an agent that has died."""
        name = self.lines[number].host.name
        if isinstance(answer, UserError):
            kind = type(answer).__name__
            if keep and self._silent.get(number) != kind:
                self._note(f"host {number}: {answer}")
            self._silent[number] = kind
            return
        if not answer:
            return
        if self._silent.pop(number, None) and keep:
            self._note(f"host {number}: {name} is reached again")
        self._judge_agent(number, name, answer, keep)

    def _judge_agent(self, number: int, name: str, answer: dict[str, Any], keep: bool) -> None:
        pid, known = answer["pid"], self._pids.get(number)
        deaths = self._deaths.setdefault(number, [])
        if pid is None:
            self._gone.add(number)
            return
        self._gone -= {number}
        self._pids[number] = pid
        if keep and known is not None and pid != known:
            deaths.append(time.monotonic())
            error = self._last_line(f"logs/agent-{number}.log")
            told = f" ({error})" if error else ""
            self._note(f"host {number}: the agent on {name} died{told}; started again")
        elif deaths and time.monotonic() > deaths[-1] + LONGEST_PAUSE_S + CALM_S:
            deaths.clear()

    def _last_line(self, place: str) -> str:
        with suppress(OSError):
            text = (self.spec.folder / place).read_bytes()[-2000:].decode(errors="replace")
            return text.strip().rpartition("\n")[2].strip()
        return ""

    def _note(self, text: str) -> None:
        with open(self.spec.folder / "events.log", "a") as events:
            now = datetime.now().astimezone()  # as the leader, who may be in another zone
            events.write(f"{now.isoformat(' ', 'milliseconds')} {redact_text(text)}\n")

    def _end(self, patience_s: float) -> list[str]:
        """Ends the agents; tells of the hosts where that could not be done."""
        words = {"name": self.spec.name, "patience_s": patience_s}
        answers = every(self.lines, lambda n, line: line.ask("end", host=n, **words))
        return [
            f"host {number}: {answer}; an agent may be left there"
            for number, answer in enumerate(answers)
            if isinstance(answer, Unreachable)
        ]

    def remove(self, *, end: bool) -> list[str]:
        """Removes the job from all hosts, with `end` its agents first; tells where that could not
        be done."""
        left = self._end(0.0) if end else []
        answers = every(self.lines, lambda _, line: line.ask("forget", name=self.spec.name))
        lost = [answer for answer in answers if isinstance(answer, Unreachable)]
        return left + [f"{answer}; the job's folder stays there" for answer in lost]

    def restart(self) -> None:
        """Lets the job begin again on its hosts. Raises UserError where one is not reached."""
        answers = every(self.lines, self.place)
        for answer in answers:
            if isinstance(answer, UserError):
                raise answer
        self.lines[0].ask("restart", name=self.spec.name)

    def close(self) -> None:
        """Ends the connections; agents live on."""
        for line in self.lines:
            line.close()


_fleets: dict[Path, Fleet] = {}


def fleet_of(spec: Spec) -> Fleet:
    """The hosts of a job; connections stay open as long as this process. Raises UserError on a
    host of the job, which does not know the others."""
    if spec.folder not in _fleets:
        facts = json.loads((spec.folder / FACTS).read_bytes())
        if "hosts" not in facts:
            raise UserError(
                f"job {spec.name} was launched from {facts['launched_from']}; look after it there"
            )
        access = Access(ssh=facts["ssh"], python=facts["python"])
        lines = [Line(Host(**host), access) for host in facts["hosts"]]
        adopt(Fleet(spec, lines))
    return _fleets[spec.folder]


def adopt(fleet: Fleet) -> None:
    """Keeps open connections for later looks."""
    _fleets[fleet.spec.folder] = fleet


def hang_up() -> None:
    """Closes all connections of this process."""
    while _fleets:
        _fleets.popitem()[1].close()


def supervise(spec: Spec) -> None:
    """Looks after a job once."""
    fleet_of(spec).look(keep=True)


def fetch(spec: Spec) -> None:
    """Fetches what is new of a job that is supervised here, and tells what could not be."""
    if "hosts" in json.loads((spec.folder / FACTS).read_bytes()):
        for problem in fleet_of(spec).look(keep=False):
            print(f"note: {problem}", file=sys.stderr)


def restart(spec: Spec) -> None:
    """Lets a job that has ended begin again."""
    fleet_of(spec).restart()


def forget(spec: Spec, *, kill: bool) -> None:
    """Removes a job from its hosts. Raises UserError if one is not reached, unless `kill`."""
    if "hosts" not in json.loads((spec.folder / FACTS).read_bytes()):
        return
    fleet = fleet_of(spec)
    if not kill:
        try:
            all_of(fleet.lines, "exists", path="/")
        except Unreachable as error:
            raise UserError(
                f"{error}; or forget it without that host: lmwright jobs forget {spec.name} --kill"
            ) from None
    for problem in fleet.remove(end=True):
        print(f"note: {problem}", file=sys.stderr)
    _fleets.pop(spec.folder).close()


def shell(spec: Spec, host: int, words: Sequence[str], tunnel: Tunnel | None = None) -> int:
    """Opens a shell on a host by the user's ssh, or runs a command there, or opens a tunnel;
    returns its exit code."""
    fleet = fleet_of(spec)
    spec.refuse_host(host, len(fleet.lines))
    line = fleet.lines[host]
    options = [*tunnel.words(), *([] if words else ["-N"])] if tunnel else []
    command = [*line.access.words(), *options, "--", line.host.name]
    command += [shlex.join(words)] if words else []
    try:
        return run_until_interrupted(command, tunnel, host)
    except FileNotFoundError:
        raise UserError(f"{command[0]}: no such program; install OpenSSH's client") from None


def _fetched(spec: Spec) -> dict[str, int]:
    with suppress(OSError, ValueError):
        return json.loads((spec.folder / FETCHED).read_bytes())
    return {}
