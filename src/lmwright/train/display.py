"""Display: the progress that a person sees while a run trains.

On a terminal a panel is redrawn in place at most twice a second; anywhere else (a log file,
a pipe) one plain line is printed each time values are given.
No thread: a panel that redraws itself would take the interpreter from the training loop.
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lmwright.config.run import Run
from lmwright.guard.terminal import visible
from lmwright.guard.unread import EXIT_UNREAD, is_of_pipe, leave_output
from lmwright.program.plan import Plan
from lmwright.report.summary import short
from lmwright.train.signals import StopRequest

REDRAW_S = 0.5
UNREAD = (
    "lmwright: nobody reads the output any more; saving, then stopping; run the same command again "
    "to continue"
)
SPARKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
SPARK_POINTS = 400
SMOOTHING = 0.9
BAR_STYLES = {"complete_style": "cyan", "finished_style": "green"}


class Display:
    """Panel or plain lines for one run; a context manager.

    `start_step` is the number of steps done before. Values are plain floats under the names
    of metrics.jsonl and stay shown until they are given again. On a process other than 0
    (`process_index`, of jax if unset) every method does nothing. `stop` is asked to save once
    nobody reads the output any more.
    """

    def __init__(
        self,
        run: Run,
        total_steps: int,
        start_step: int,
        *,
        process_index: int | None = None,
        stop: StopRequest | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if process_index is None:
            import jax

            process_index = jax.process_index()
        self._name = visible(run.name, lines=False)
        self._total = total_steps
        self._step = start_step
        # steps between two plain lines may be hours: how long it takes is said as soon as known
        self._told_early = start_step + 2 if run.metrics.log_every_steps > 2 else None
        self._active = process_index == 0
        # a pipe is none where FORCE_COLOR says so, as in what a notebook starts: nothing is redrawn
        self._console = console or Console(force_terminal=None if sys.stdout.isatty() else False)
        self._stop = stop
        self._clock = clock
        self._values: dict[str, float] = {}
        self._losses: deque[float] = deque(maxlen=SPARK_POINTS)
        self._smooth_loss: float | None = None
        self._held_out: tuple[int, dict[str, tuple[float, str]]] | None = None
        self._saved_step: int | None = None
        self._marks: deque[tuple[float, int]] = deque(maxlen=64)  # (clock, step), for the ETA
        self._drawn = float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._active and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self._panel(), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            with self._written():
                self._live.update(self._panel(), refresh=True)
                self._live.stop()
            self._live = None

    def update(self, step: int, **values: float) -> None:
        """Shows step `step` as done; values may be left out between two log lines."""
        if not self._active:
            return
        now = self._clock()
        self._step = step
        self._values.update(values)
        if "loss" in values:
            self._add_loss(values["loss"])
        # The first step also holds the compilation, so speed is counted from its end.
        if not self._marks or now - self._marks[-1][0] >= REDRAW_S:
            self._marks.append((now, step))
        if self._live is None:
            if values:
                self._print(self._line())
            elif step == self._told_early:
                self._print(f"step {step}/{self._total}{self._eta_text()}")
        elif now - self._drawn >= REDRAW_S or step >= self._total:
            with self._written():
                self._live.update(self._panel(), refresh=True)
            self._drawn = now

    def evaluated(self, step: int, losses: Mapping[str, tuple[float, str]]) -> None:
        """Prints held-out losses, one per source, and keeps them in the panel, with the rows they
        cover, such as "128 of 352 rows"."""
        self._held_out = (step, dict(losses))
        self.note(f"step {step}: held-out loss  {self._held_out_text()}")

    def saved(self, step: int) -> None:
        """Keeps the step of the newest checkpoint in the panel."""
        self._saved_step = step

    def note(self, text: str) -> None:
        """Prints a line above the panel; markup in it is not interpreted."""
        if self._active:
            self._print(text)

    def eta_s(self) -> float | None:
        """Remaining seconds at the recent speed; None before any step was timed."""
        if not self._marks:
            return None
        then, step = self._marks[0]
        elapsed_s = self._clock() - then
        if self._step <= step or elapsed_s <= 0:
            return None
        return (self._total - self._step) * elapsed_s / (self._step - step)

    def _add_loss(self, loss: float) -> None:
        self._losses.append(loss)
        if self._smooth_loss is None or not math.isfinite(self._smooth_loss):
            self._smooth_loss = loss
        elif math.isfinite(loss):
            self._smooth_loss = SMOOTHING * self._smooth_loss + (1 - SMOOTHING) * loss

    def _print(self, text: str) -> None:
        with self._written():
            self._console.print(visible(text), markup=False, highlight=False, soft_wrap=True)
            if self._live is None:
                self._console.file.flush()

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Context in which something is shown. Where that fails after the first step, the run's
        work is not lost with it: it saves and stops if the reader of a pipe has left, and else goes
        on without output, of which metrics.jsonl has everything."""
        try:
            yield
        except (OSError, SystemExit) as error:
            if self._stop is None or self._stop.starting:
                raise
            if is_of_pipe(error) and leave_output(error):
                self._stop.exit_code = self._stop.exit_code or EXIT_UNREAD
                said = UNREAD
            elif isinstance(error, OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._console.file.fileno())
                said = f"lmwright: output: {error.strerror}; training continues without it"
            else:
                raise
            with suppress(OSError):
                print(said, file=sys.stderr)

    def _line(self) -> str:
        parts = [f"step {self._step}/{self._total}", *(f"{n} {v}" for n, v in self._facts())]
        return "  ".join(parts) + self._eta_text()

    def _eta_text(self) -> str:
        eta_s = self.eta_s()
        return "" if eta_s is None else f"  ETA {duration(eta_s)}"

    def _facts(self) -> list[tuple[str, str]]:
        """Name and value of everything known now, most important first."""
        return [
            (label, text(self._values[name]))
            for name, label, text in FORMATS
            if name in self._values
        ]

    def _held_out_text(self) -> str:
        if self._held_out is None:
            return ""
        losses = self._held_out[1].items()
        return "  ".join(
            f"{visible(name, lines=False)} {loss:.4f}" + (f" ({over})" if over else "")
            for name, (loss, over) in losses
        )

    def _panel(self) -> Panel:
        total, step = max(self._total, 1), min(self._step, self._total)
        rows = [
            self._row(f"step {step:,} of {total:,}", f"{step / total:.0%}{self._eta_text()}"),
            # A bar ends without a newline, so that the row after it would be cut; padding ends it.
            Padding(ProgressBar(total=total, completed=step, **BAR_STYLES), 0),
        ]
        if facts := self._facts():
            rows.append(self._grid(facts))
        if len(self._losses) > 1 and "utf" in self._console.encoding.lower():
            rows.append(Text(sparkline(self._losses, max(self._console.width - 4, 8)), "cyan"))
        if self._held_out:
            rows.append(self._row(f"held-out at {self._held_out[0]:,}", self._held_out_text()))
        if self._saved_step is not None:
            rows.append(self._row("checkpoint", f"step {self._saved_step:,}"))
        return Panel(Group(*rows), title=Text(self._name), title_align="left", border_style="dim")

    def _grid(self, facts: list[tuple[str, str]]) -> Table:
        """Names above values, in as many columns as the terminal holds."""
        if self._smooth_loss is not None and facts[0][0] == "loss":
            facts = [facts[0], ("smoothed", f"{self._smooth_loss:.4f}"), *facts[1:]]
        columns = max(1, min(len(facts), (self._console.width - 4) // 13))
        grid = Table.grid(padding=(0, 2))
        for start in range(0, len(facts), columns):
            chunk = facts[start : start + columns]
            grid.add_row(*(Text(name, "dim", no_wrap=True) for name, _ in chunk))
            grid.add_row(*(Text(value, "bold", no_wrap=True) for _, value in chunk))
        return grid

    def _row(self, name: str, value: str) -> Text:
        row = Text.assemble((name, "dim"), "  ", value, no_wrap=True)
        row.truncate(max(self._console.width - 4, 4), overflow="ellipsis")
        return row


def duration(seconds: float) -> str:
    """Seconds as `42s`, `3m 05s`, `7h 12m` or `2d 03h`."""
    s = max(round(seconds), 0)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m {s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h {s % 3600 // 60:02d}m"
    return f"{s // 86400}d {s % 86400 // 3600:02d}h"


def sparkline(values: Iterable[float], width: int) -> str:
    """Values as block characters, at most `width`, each the mean of its group; NaN is blank."""
    values = list(values)
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return " " * width
    low, spread = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        SPARKS[min(int((mean - low) / spread * len(SPARKS)), len(SPARKS) - 1)]
        if math.isfinite(mean)
        else " "
        for mean in means
    )


FORMATS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda v: f"{v:.4f}"),
    ("tokens_per_s", "tokens/s", short),
    ("learning_rate", "LR", lambda v: f"{v:.2e}"),
    ("grad_norm", "grad norm", lambda v: f"{v:.3g}"),
    ("step_time_p50_s", "s/step", lambda v: f"{v:.3g}"),
    ("input_wait_share", "input wait", lambda v: f"{v:.1%}"),
    ("mfu", "MFU", lambda v: f"{v:.1%}"),
    ("peak_memory_bytes", "memory", lambda v: f"{v / 2**30:.3g} GiB"),
    ("tokens_seen", "tokens", short),
)
"""Metric, its label, and how a value is written, in the order they are shown."""


def headline(plan: Plan) -> str:
    """The model, the length of its training and the devices, as one line."""
    run, kind = plan.run, plan.devices[0].device_kind
    steps = max(trainee.steps for trainee in plan.training.trainees)
    return (
        f"{run.name}: {run.model.kind}, {plan.num_params:,} parameters, {steps:,} "
        f"steps of {plan.tokens_per_step:,} tokens on {len(plan.devices)} x {kind}"
    )
