"""Pieces: a log that grows, in a bucket whose objects cannot.

    logs/host-0/000000.log   whole
    logs/host-0/000001.log   the last one, which is written again until it is large

Only the last piece is sent or read again, so that a long log costs no more than a short one. A new
slice goes on with a piece of its own, after those of the slices before.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lmwright.guard.files import write_whole
from lmwright.storage.bucket import Bucket, Entry

PIECE = 1 << 18  # bytes


def _name(host: int, number: int) -> str:
    return f"logs/host-{host}/{number:06}.log"


class LogSender:
    """Sends the log of a host, with `***` for what is hidden."""

    def __init__(self, bucket: Bucket, log: Path, host: int, hidden: Sequence[bytes] = ()):
        self._bucket, self._log, self._host, self._hidden = bucket, log, host, hidden
        self._place = log.with_suffix(".sent")
        self._number: int | None = None
        self._at = 0
        """Where the last piece begins in the log."""
        self._sent = -1
        """Bytes of the log in the last piece."""

    def send(self, *, closing: bool = False) -> None:
        """Sends what is new, up to the last whole line; with `closing`, all. Raises UserError and
        OSError; then another call goes on."""
        if not self._log.exists():
            return
        if self._number is None:
            self._number = self._begin()
        while True:
            with open(self._log, "rb") as log:
                log.seek(self._at)
                data = log.read(PIECE)
            full = len(data) == PIECE
            end = len(data) if closing and not full else _cut(data, self._hidden, full)
            if end != self._sent:
                self._bucket.write(_name(self._host, self._number), self._shown(data[:end]))
                self._sent = end
            if not full:
                return
            self._number, self._at, self._sent = self._number + 1, self._at + end, -1
            self._keep()

    def _begin(self) -> int:
        """The first piece that is this log's; where the agent was started again, its last."""
        with suppress(OSError, ValueError, KeyError):
            known = json.loads(self._place.read_bytes())
            self._at = known["at"]
            return known["number"]
        there = self._bucket.entries(f"logs/host-{self._host}")
        self._number = max((int(name[-10:-4]) + 1 for name in there), default=0)
        self._keep()
        return self._number

    def _keep(self) -> None:
        write_whole(self._place, json.dumps({"number": self._number, "at": self._at}))

    def _shown(self, data: bytes) -> bytes:
        for secret in self._hidden:
            data = data.replace(secret, b"***")
        return data


def _cut(data: bytes, hidden: Sequence[bytes], full: bool) -> int:
    """Position at which data may end: after a line, and not within a secret, which may have several
    lines."""
    end = data.rfind(b"\n") + 1 or (len(data) if full else 0)
    for secret in hidden:
        for start in range(max(0, end - len(secret) + 1), end):
            if secret.startswith(data[start:end]):
                end = start
                break
    return end or (len(data) if full else 0)


class LogReader:
    """Reads the log of a host as it grows."""

    def __init__(self, bucket: Bucket, host: int):
        self._bucket, self._host = bucket, host
        self._number = self._shown = 0
        self._seen: Entry | None = None
        self._rest = b""

    def lines(self, *, over: bool = False) -> list[str]:
        """The whole lines that are new; with `over`, the last one though it has no end."""
        while True:
            follows = self._bucket.entry(_name(self._host, self._number + 1)) is not None
            self._read()
            if not follows:  # else this piece was complete when it was read
                break
            self._number, self._shown, self._seen = self._number + 1, 0, None
        whole = len(self._rest) if over else self._rest.rfind(b"\n") + 1
        data, self._rest = self._rest[:whole], self._rest[whole:]
        return data.decode(errors="replace").splitlines()

    def _read(self) -> None:
        entry = self._bucket.entry(_name(self._host, self._number))
        if entry is None or entry == self._seen:
            return
        there = self._bucket.read(_name(self._host, self._number))
        if there is not None:
            data, self._seen = there
            self._rest += data[self._shown :]
            self._shown = len(data)
