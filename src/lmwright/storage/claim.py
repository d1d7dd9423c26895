"""Claim: the right to write in a folder of a bucket, held by one process of all machines.

    .claim.json   {"owner", "host", "machine", "pid", "job", "attempt", "token", "beat"}

The object is written only over the generation that was read before, so of two processes one gets
it. Its owner writes it again every `BEAT_S`; an owner that has not done so for `LEASE_S`, by the
service's clock, is dead, and so is one of this machine whose process is gone. A later attempt of
the same job takes over at once: whoever starts it has ended the one before. The clocks of the
machines are never compared.
"""

import getpass
import json
import os
import socket
import threading
import uuid
from contextlib import suppress
from typing import Any

import psutil

from lmwright.errors import TransientError, UserError
from lmwright.guard.processes import began_at, start_of
from lmwright.storage.bucket import Bucket, Changed, Entry

CLAIM = ".claim.json"
PROBE = ".claim-probe"
BEAT_S = 10.0
LEASE_S = 60.0
TRAINED = "dir: {url} is being trained by {owner}; wait for it, stop it, or choose dir="
JOB, ATTEMPT = "LMWRIGHT_JOB", "LMWRIGHT_ATTEMPT"


class Claimed(UserError):
    """The claim has a living owner."""


class TakenOver(UserError):
    """Another process has taken over what this one did."""


class Claim:
    """A claim that is held, and renewed by a thread until `close`."""

    def __init__(self, bucket: Bucket, busy: str = TRAINED):
        """Takes the claim. Raises Claimed, by the sentence `busy`, if it has a living owner."""
        self._bucket, self._busy = bucket, busy
        self._facts = _own_facts()
        self._generation = self._take()
        self._lost: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claim", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises TakenOver if another process has taken the claim over."""
        if self._lost is not None:
            raise TakenOver(
                f"dir: {self._bucket.url} was taken over by {self._lost}, since this process was "
                "not heard of for a minute; nothing is written there any more"
            )

    def confirm(self) -> None:
        """Raises TakenOver if another process has taken the claim over; asks the bucket now."""
        self._see(self._bucket.read(CLAIM))
        self.check()

    def _see(self, there: tuple[bytes, Entry] | None) -> None:
        """Notes that a claim is another's."""
        if there is None:
            self._lost = "somebody who removed the claim"
        elif _parse(there[0]).get("token") != self._facts["token"]:
            self._lost = _describe(there[0])

    def close(self) -> None:
        """Gives the claim back."""
        self._closing.set()
        self._thread.join()
        with suppress(Changed, UserError):  # the lease ends by itself
            self._bucket.remove(CLAIM, self._generation)

    def _take(self) -> int:
        there = self._bucket.read(CLAIM)
        if there is not None and self._is_alive(*there):
            owner = _describe(there[0])
            busy = Claimed(self._busy.format(url=self._bucket.url, owner=owner))
            if self._is_ours(there[0]):  # by a process of an attempt that has just ended
                busy.exit_code = TransientError(str(busy)).exit_code
            raise busy
        try:
            return self._write(there[1].generation if there else 0)
        except Changed:
            raise UserError(
                f"{self._bucket.url}: was claimed by another process at the same moment; "
                "choose another folder for one of the two"
            ) from None

    def _write(self, generation: int) -> int:
        self._facts["beat"] += 1
        return self._bucket.write(CLAIM, json.dumps(self._facts), generation).generation

    def _is_alive(self, data: bytes, entry: Entry) -> bool:
        """True unless the owner of a claim is known to be dead."""
        facts, ours = _parse(data), self._facts
        if self._is_ours(data):
            with suppress(TypeError, ValueError):
                if int(facts.get("attempt", 0)) < int(ours["attempt"]):
                    return False
        if facts.get("machine") == ours["machine"] and not _runs(facts):
            return False
        return (self._now() - entry.updated).total_seconds() < LEASE_S

    def _is_ours(self, data: bytes) -> bool:
        """True for a claim of the same job."""
        return bool(self._facts["job"]) and _parse(data).get("job") == self._facts["job"]

    def _now(self) -> Any:
        """The service's time, from an object written now."""
        name = f"{PROBE}-{self._facts['token']}"
        now = self._bucket.write(name, "").updated
        self._bucket.remove(name)
        return now

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S) and self._lost is None:
            with suppress(UserError):  # the service does not answer; a later beat will tell
                self._renew()

    def _renew(self) -> None:
        try:
            self._generation = self._write(self._generation)
        except Changed:
            there = self._bucket.read(CLAIM)
            self._see(there)
            if there is not None and self._lost is None:
                self._generation = there[1].generation


def _own_facts() -> dict[str, Any]:
    process = psutil.Process()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a user's name
        user = str(os.getuid())
    return {
        "owner": user,
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": process.pid,
        "began": process.create_time(),  # for earlier versions, which know no "start"
        "start": start_of(process.pid),
        "job": os.environ.get(JOB, ""),
        "attempt": os.environ.get(ATTEMPT, "0"),
        "token": uuid.uuid4().hex,
        "beat": 0,
    }


def _machine() -> str:
    """Name of this boot of this machine, and of the container that sees the same process
    numbers."""
    parts = [str(psutil.boot_time())]
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts = [file.read().strip()]
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _runs(facts: dict[str, Any]) -> bool:
    """True if the process that wrote a claim on this machine still runs."""
    try:
        pid, start = int(facts["pid"]), float(facts.get("start") or facts["began"])
        return began_at(pid, start) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
    except psutil.AccessDenied:
        return True


def _parse(data: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _describe(data: bytes) -> str:
    facts = _parse(data)
    owner = f"{facts.get('owner', 'somebody')} on {facts.get('host', 'another machine')}"
    return f"{owner} (process {facts.get('pid', '?')})"
