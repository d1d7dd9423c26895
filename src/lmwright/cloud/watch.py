"""Watch: what a job on slices says of itself in its bucket, and what its words mean.

state.json     by the leader, every few seconds
events.log     by the leader, a line for each event
logs, console  output of the ranks, and of hosts that cannot start
"""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

from lmwright.cloud.book import STATE
from lmwright.cloud.spec import START
from lmwright.storage.bucket import Bucket

EVENTS, CONSOLE = "events.log", "console"
TAIL = 20_000  # bytes
ATTEMPT = b"--- attempt "
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
CORRUPTED = re.compile(r"exit code 47\b")  # of a device that computes other bits than its peers
NO_QUOTA = re.compile(r"\b[Qq]uota\b")
OF_THE_USER = re.compile(r"exit code (2|44|46)\b")


class Watch:
    """Listens to the leader of a job."""

    def __init__(self, bucket: Bucket):
        self._bucket = bucket
        self._generation: int | None = None
        self._events: tuple[int, int] | None = None
        self.heard = time.monotonic()
        """When the leader was heard last."""
        self.spoke = False
        """True once it was heard since `start`."""

    def start(self) -> None:
        """Waits for the first word of other hosts."""
        self.heard, self.spoke = time.monotonic(), False

    def forgive(self) -> None:
        """Begins to count again, since nothing could be heard meanwhile."""
        self.heard = time.monotonic()

    def look(self) -> dict[str, Any]:
        """The job's state as its leader wrote it last."""
        there = self._bucket.read(STATE)
        generation = there[1].generation if there else 0
        if generation != self._generation:
            self.spoke = self.spoke or self._generation is not None
            self._generation, self.heard = generation, time.monotonic()
        return json.loads(there[0]) if there else dict(START)

    def write(self, state: dict[str, Any]) -> None:
        """Writes the state in the leader's place."""
        self._generation = self._bucket.write(STATE, json.dumps(state)).generation

    def events(self) -> list[str]:
        """New lines of the leader's events; the first time none."""
        entry = self._bucket.entry(EVENTS)
        generation = entry.generation if entry else 0
        if self._events is not None and generation == self._events[0]:
            return []
        there = self._bucket.read(EVENTS)
        data = there[0] if there else b""
        whole = data[: data.rfind(b"\n") + 1]
        shown = len(whole) if self._events is None else min(self._events[1], len(whole))
        self._events = (there[1].generation if there else 0), len(whole)
        return whole[shown:].decode(errors="replace").splitlines()


def bad_slice(bucket: Bucket, state: dict[str, Any]) -> str:
    """Reason why another slice may cure the failure of a job; empty where it does not. A rank that
    a signal has ended gives its reason in its log only."""
    error, status = state["error"], state["status"]
    if status in ("failed", "waiting") and CORRUPTED.search(error):
        return error
    if status != "failed":
        return ""
    if any(word in error for word in BAD_SLICE):
        return error
    if OF_THE_USER.search(error):
        return ""
    for data in _ends_of_logs(bucket):
        for line in data.rpartition(ATTEMPT)[2].decode(errors="replace").splitlines():
            if any(word in line for word in BAD_SLICE):
                return line.strip()[:500]
    return ""


def _ends_of_logs(bucket: Bucket) -> Iterator[bytes]:
    """End of the log of each host. A log is an object, or a folder of pieces in order."""
    pieces: dict[str, list[str]] = {}
    for name in sorted(bucket.entries("logs")):
        host = name.removeprefix("logs/").removesuffix(".log").partition("/")[0]
        pieces.setdefault(host, []).append(name)
    for names in pieces.values():
        read = (bucket.read(name) for name in names[-2:])
        yield b"".join(there[0] for there in read if there)[-TAIL:]


def last_words(bucket: Bucket, id: str) -> str:
    """Last line that a host of a slice wrote before it could start, and where; or empty."""
    for name in sorted(bucket.entries(CONSOLE)):
        there = bucket.read(name) if name.startswith(f"{CONSOLE}/{id}-") else None
        lines = there[0].decode(errors="replace").split("\n") if there else []
        if lines := [line.strip() for line in lines if line.strip()]:
            return f"{lines[-1][:300]} ({bucket.url}/{name})"
    return ""
