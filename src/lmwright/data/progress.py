"""Progress of a stage: a live bar on a terminal, an occasional plain line elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from lmwright.data.manifest import total

PLAIN_EVERY_S = 10.0


class Progress:
    """Display of the progress of a stage; this one shows nothing."""

    begun: float | None = None
    """Start of the last stage that had work to do, on the monotonic clock."""

    def start(self, stage: str, parts: int, done: int, unit: str) -> None:
        """Begins a stage of `parts` parts, of which `done` exist already."""
        self.unit, self.amount, self.begun = unit, 0.0, time.monotonic()

    def advance(self, counts: Mapping[str, Any]) -> None:
        """Records a finished part; `counts` are what its work returned."""
        self.amount += total(counts, self.unit)

    def expect(self, parts: int) -> None:
        """Corrects the number of parts, where it becomes known on the way."""

    def finish(self) -> None:
        """Ends the stage, whether it succeeded or not."""

    def rate(self) -> str:
        """Speed of the work so far, such as "12,345 tokens/s"."""
        seconds = max(time.monotonic() - self.begun, 1e-9)
        unit = "entries" if self.unit == "vocab_size" else self.unit
        return f"{self.amount / seconds:,.0f} {unit}/s"


class PlainProgress(Progress):
    """Plain lines: one at the start, at most one every ten seconds, one at the end."""

    def start(self, stage: str, parts: int, done: int, unit: str) -> None:
        super().start(stage, parts, done, unit)
        self.stage, self.parts, self.done, self.at_start = stage, parts, done, done
        self.printed = self.begun
        if done:
            self._print(f"{stage}: continues, {done} of {parts} parts are done")

    def advance(self, counts: Mapping[str, Any]) -> None:
        super().advance(counts)
        self.done += 1
        now = time.monotonic()
        if now - self.printed >= PLAIN_EVERY_S and self.done < self.parts:
            self.printed = now
            left = (now - self.begun) / (self.done - self.at_start) * (self.parts - self.done)
            self._print(f"{self._state()}, ETA {left:,.0f} s")

    def expect(self, parts: int) -> None:
        self.parts = parts

    def finish(self) -> None:
        if self.done > self.at_start:
            self._print(f"{self._state()}, {time.monotonic() - self.begun:,.1f} s")

    def _state(self) -> str:
        return f"{self.stage}: {self.done} of {self.parts} parts, {self.rate()}"

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class LiveProgress(Progress):
    """Bar with parts, rate and remaining time (rich)."""

    def start(self, stage: str, parts: int, done: int, unit: str) -> None:
        from rich import progress as bars
        from rich.console import Console

        super().start(stage, parts, done, unit)
        self.bar = bars.Progress(
            bars.TextColumn("{task.description:<10}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[rate]}"),
            bars.TimeElapsedColumn(),
            bars.TextColumn("ETA"),
            bars.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.bar.start()
        self.task = self.bar.add_task(stage, total=parts, completed=done, rate="")

    def advance(self, counts: Mapping[str, Any]) -> None:
        super().advance(counts)
        self.bar.update(self.task, advance=1, rate=self.rate())

    def expect(self, parts: int) -> None:
        self.bar.update(self.task, total=parts)

    def finish(self) -> None:
        self.bar.stop()


def console_progress() -> Progress:
    """The display that fits standard error: live on a terminal, plain lines elsewhere."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()
