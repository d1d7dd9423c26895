"""Line: a connection to a host, by the user's own ssh.

One ssh process stays open for each host; what runs at its other end is `far`.
"""

import json
import os
import select
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

from lmwright import __version__
from lmwright.cloud.ssh.far import MARK
from lmwright.cloud.ssh.hosts import Host
from lmwright.errors import UserError
from lmwright.guard.terminal import visible

OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10", "ServerAliveCountMax=3")
ANSWER_S = 60.0  # importing from a slow network disk, too
EXIT_SSH = 255  # of ssh itself, whatever went wrong
EXIT_NOT_FOUND = 127
LONGEST_PAUSE_S = 30.0
CURES = {
    "Permission denied": "add your key there (ssh-copy-id {host}), or load it (ssh-add)",
    "Host key verification failed": "connect once by hand, and compare its key: ssh {host}",
    "Could not resolve": "correct the name in the file of hosts, or add it to ~/.ssh/config",
    "Too many authentication failures": "name the key in ~/.ssh/config, with IdentitiesOnly yes",
}
OTHER_CURE = "try it by hand: ssh {host} true"


class Unreachable(UserError):
    """A host that ssh does not reach, or that does not answer."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Commands by which hosts are reached."""

    ssh: str = "ssh"
    """Command that runs ssh, as in `ssh -F FILE`."""
    python: str = "python3"
    """Command of the Python that has lmwright there, for the shell of the host."""

    def command(self, host: Host) -> list[str]:
        """Command of a connection."""
        options = [word for option in OPTIONS for word in ("-o", option)]
        far = f"{self.python} -m lmwright.cloud.ssh.far"
        return [*self.words(), *options, "-T", "--", host.name, far]

    def words(self) -> list[str]:
        """The user's ssh command as words."""
        try:
            return shlex.split(self.ssh) or ["ssh"]
        except ValueError as error:
            raise UserError(f"cloud.toml: ssh: {self.ssh!r}: {error}") from None


class Line:
    """A connection to a host, opened when it is needed."""

    def __init__(self, host: Host, access: Access):
        self.host, self.access = host, access
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._failures, self._next = 0, 0.0
        self.placed = False
        """True once the job was placed there over this connection."""

    def ask(self, do: str, *, within_s: float = ANSWER_S, **words: Any) -> dict[str, Any]:
        """Has something done there. Raises Unreachable, or UserError with the host's own error."""
        process = self._process or self._open()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"do": do, **words}).encode() + b"\n")
            process.stdin.flush()
            answer = self._read(process, time.monotonic() + within_s)
        except OSError:
            answer = None
        except TimeoutError:
            raise self._lost(f"no answer within {within_s:g} s; {OTHER_CURE}") from None
        if answer is None:
            raise self._lost(self._reason(process))
        self._failures = 0
        if "error" in answer:
            raise UserError(f"{self.host.name}: {visible(answer['error'])}")
        return answer

    @property
    def rests(self) -> bool:
        """True for a while after a failure, longer after each."""
        return time.monotonic() < self._next

    def close(self) -> None:
        """Ends the connection; agents there live on."""
        process, self._process, self.placed, self._buffer = self._process, None, False, b""
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue
        process.kill()
        process.wait()
        self._errors.close()

    def _open(self) -> subprocess.Popen[bytes]:
        # Into a file: a master connection that ssh leaves behind would hold a pipe open.
        self._errors = TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self.access.command(self.host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the supervisor alone
            )
        except FileNotFoundError as error:
            raise UserError(
                f"{error.filename}: no such program; install OpenSSH's client"
            ) from None
        return self._process

    def _read(self, process: subprocess.Popen[bytes], end: float) -> dict[str, Any] | None:
        """The next answer; None where the connection has ended."""
        assert process.stdout is not None
        file = process.stdout.fileno()
        while True:
            while b"\n" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\n")
                if line.startswith(MARK.encode()):
                    return json.loads(line[len(MARK) :])
            if not select.select([file], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError
            data = os.read(file, 1 << 16)
            if not data:
                return None
            self._buffer += data

    def _lost(self, reason: str) -> Unreachable:
        self.close()
        self._failures += 1
        self._next = time.monotonic() + min(2.0 ** (self._failures - 1), LONGEST_PAUSE_S)
        return Unreachable(f"{self.host.name}: {reason.replace('{host}', self.host.name)}")

    def _reason(self, process: subprocess.Popen[bytes]) -> str:
        """Reason why a connection has ended, and the cure."""
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            code = EXIT_SSH
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        last = visible(lines[-1] if lines else "the connection was closed")
        last, python = last.rstrip("."), self.access.python
        name_it = "name the Python that has it: --remote-python /path/to/python"
        if code == EXIT_SSH:
            cures = [cure for pattern, cure in CURES.items() if pattern in last]
            return f"{last}; {cures[0] if cures else OTHER_CURE}"
        if code == EXIT_NOT_FOUND:
            return f"there is no {python} there; install lmwright {__version__} there, or {name_it}"
        if "No module named" in last:
            return (
                f"{python} has no lmwright {__version__} there ({last}); install it there, or "
                f"{name_it}"
            )
        return f"{python} ended with exit code {code}: {last}; {OTHER_CURE}"


def every(
    lines: Sequence[Line], ask: Callable[[int, Line], dict[str, Any]]
) -> list[dict[str, Any] | UserError]:
    """Answers of `ask(number, line)` for each host, all at once; errors in their place."""

    def one(number: int) -> dict[str, Any] | UserError:
        try:
            return ask(number, lines[number])
        except UserError as error:
            return error

    with ThreadPoolExecutor(max(1, len(lines))) as pool:
        return list(pool.map(one, range(len(lines))))


def all_of(lines: Sequence[Line], do: str, **words: Any) -> list[dict[str, Any]]:
    """The answers of all hosts. Raises the first host's error; the others that failed are named."""
    answers = every(lines, lambda _, line: line.ask(do, **words))
    failed = [n for n, answer in enumerate(answers) if isinstance(answer, UserError)]
    if not failed:
        return [answer for answer in answers if isinstance(answer, dict)]
    first = answers[failed[0]]
    also = ", ".join(lines[n].host.name for n in failed[1:9])
    more = f" (so with {len(failed) - 1} more: {also})" if also else ""
    raise type(first)(f"{first}{more}")  # type: ignore[call-arg]
