"""Tell: says on the terminal what happens to a job, and to the user's own command.

notify = "curl -d @- https://ntfy.sh/my-topic"     in cloud.toml; gets a line for each event
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lmwright.cloud.target import settings_path, settings_with
from lmwright.errors import UserError
from lmwright.guard.terminal import visible
from lmwright.guard.urls import redact_text
from lmwright.storage.claim import TakenOver

NOTIFY_S = 30.0
TOLD_TO_END = (signal.SIGTERM, signal.SIGHUP)


class Teller:
    """Tells lines. A settings file that is wrong for a while costs no line and ends nothing."""

    def __init__(self) -> None:
        self._command = self._complained = ""

    def __call__(self, text: str) -> None:
        """Prints a line with the time, and passes it on."""
        print(f"{time.strftime('%H:%M:%S')} {visible(redact_text(text))}", flush=True)
        self.pass_on(text)

    def pass_on(self, text: str) -> None:
        """Gives a line to the user's command, if there is one."""
        if command := self._now():
            notify(command, visible(redact_text(text)))

    def _now(self) -> str:
        """The command of the settings as they are now, or were when they could be read last."""
        try:
            self._command = settings_with().notify
        except UserError as error:
            if f"{error}" != self._complained:
                self._complained = f"{error}"
                print(f"notify: {visible(self._complained)}", flush=True)
        return self._command


def notify(command: str, line: str) -> None:
    """Passes a line to the user's command; its failure is reported and has no other effect."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command], input=line + "\n", text=True, timeout=NOTIFY_S,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        reason = f"exit code {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = type(error).__name__
    if reason:
        print(f"notify: the command of {settings_path()} failed ({reason})", flush=True)


@contextmanager
def last_words(tell: Teller, text: str) -> Iterator[None]:
    """Tells that a supervisor ends, whatever ends it; Ctrl-C needs no telling. `text` says what
    that means for the job, where no other supervisor has it now."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {}
    for number in TOLD_TO_END:
        try:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
                before[number] = signal.signal(number, end)
        except ValueError:  # not in the main thread: the caller handles signals
            break
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        ended = isinstance(error, SystemExit)
        reason = "it was told to end" if ended else f"{error}" or type(error).__name__
        meaning = "" if isinstance(error, TakenOver) else f"; {text}"
        tell.pass_on(f"the supervisor ends: {reason}{meaning}")
        if meaning:
            with suppress(OSError):  # the terminal may be gone
                print(f"the supervisor ends{meaning}", file=sys.stderr, flush=True)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
