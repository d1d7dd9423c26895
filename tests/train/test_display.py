"""The display on terminals of any width, in logs, and what it says."""

import io
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from lmwright.guard.unread import EXIT_UNREAD
from lmwright.train import command
from lmwright.train.display import SPARKS, Display, duration, sparkline
from lmwright.train.loop import Outcome
from tests.train.bare_run import make_run

VALUES = {
    "loss": 3.25,
    "tokens_per_s": 123456.0,
    "learning_rate": 3e-4,
    "grad_norm": 0.5,
    "step_time_p50_s": 0.02,
    "input_wait_share": 0.01,
    "mfu": 0.4,
    "peak_memory_bytes": 3 * 2**30,
    "tokens_seen": 5e9,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def show(terminal, width, steps=40, height=40, **kwargs):
    """Runs a display for `steps` steps of 1 s, from step 100 on; what it wrote."""
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=terminal, width=width, height=height, **kwargs)
    with Display(
        make_run(), 100 + 2 * steps, 100, process_index=0, console=console, clock=clock
    ) as d:
        for step in range(101, 101 + steps):
            clock.now += 1.0
            d.update(step, **(VALUES if step % 10 == 0 else {}))
        d.evaluated(step, {"wiki": (3.1234, "8 of 9 rows"), "a source with a long name": (4.5, "")})
        d.saved(step)
        d.note("[red]not markup[/red] " + "x" * 30)
    return out.getvalue()


@pytest.mark.parametrize("width", [9, 17, 30, 55, 80, 200])
def test_panel_fits_terminals_of_any_width(width):
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", show(True, width))
    lines = [line for line in text.splitlines() if not line.startswith(("[red]", "step 140: held"))]
    assert len(lines) > 40
    assert max(cell_len(line) for line in lines) <= width


def test_panel_says_it_all():
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", show(True, 160))
    panel = text[text.rindex("step 140 of") :]
    for part in ("140 of 180", "ETA 40s", "3.2500", "123k", "3.00e-04", "40.0%", "3 GiB", "5B"):
        assert part in panel, part
    for part in ("held-out at 140", "wiki 3.1234", "checkpoint", SPARKS[0]):
        assert part in panel, part
    assert "[red]not markup[/red]" in text


LABELS = {
    "loss": "3.2500",
    "smoothed": "3.2500",
    "tokens/s": "123k",
    "LR": "3.00e-04",
    "grad norm": "0.5",
    "s/step": "0.02",
    "input wait": "1.0%",
    "MFU": "40.0%",
    "memory": "3 GiB",
    "tokens": "5B",
}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_each_label_stands_above_its_value(width, height):
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", show(True, width, height=height))
    lines = text[text.rindex("step 140 of") :].splitlines()
    columns = {}  # label: line and column
    for number, line in enumerate(lines):
        for label in LABELS:
            if found := re.search(rf"(?<=  ){label}(?=  )|(?<=\u2502 ){label}(?=  )", line):
                columns.setdefault(label, (number, found.start()))
    assert set(columns) == set(LABELS)
    for label, value in LABELS.items():
        number, column = columns[label]
        assert lines[number + 1][column:].startswith(value + " "), label


def test_log_file_gets_plain_lines_only():
    text = show(False, 60)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines.pop(0).startswith("step 102/180  ETA ")  # as soon as it is known
    assert len(lines) == 6  # four log lines, uncut though longer than the width, and two notes
    assert lines[4] == (
        "step 140: held-out loss  wiki 3.1234 (8 of 9 rows)  a source with a long name 4.5000"
    )
    assert lines[0].startswith("step 110/180  loss 3.2500  tokens/s 123k  LR 3.00e-04")
    assert lines[3].endswith("ETA 40s")


def test_other_processes_are_silent():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    with Display(make_run(), 10, 0, process_index=3, console=console) as display:
        display.update(5, loss=1.0)
        display.note("x")
    assert out.getvalue() == ""


def test_nothing_is_redrawn_in_a_pipe_that_is_to_have_colors(monkeypatch, capfd):
    """As a notebook asks of all that it starts, and servers that build."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Display(make_run(), 10, 0, process_index=0) as display:
        display.note("compiled")
    told = capfd.readouterr().out
    assert "compiled" in told and "\x1b[?25l" not in told and "\u2500" not in told


def test_terminal_is_restored_after_an_error():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        with Display(make_run(), 10, 0, process_index=0, console=console):
            raise KeyboardInterrupt
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1


def test_redraws_are_bounded_by_time_not_by_steps():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=80)
    with Display(make_run(), 10**6, 0, process_index=0, console=console, clock=clock) as display:
        display.update(1, **VALUES)
        drawn = len(out.getvalue())
        for step in range(2, 1000):
            clock.now += 0.0004  # 0.4 s altogether
            display.update(step, **VALUES)
        assert len(out.getvalue()) == drawn
        clock.now += 0.2
        display.update(1000)
        assert len(out.getvalue()) > drawn


def test_eta_follows_the_speed_of_late():
    clock = Clock()
    console = Console(file=io.StringIO())
    with Display(make_run(), 1000, 0, process_index=0, console=console, clock=clock) as display:
        assert display.eta_s() is None
        for step in range(1, 101):
            clock.now += 60.0
            display.update(step)
        for step in range(101, 201):
            clock.now += 1.0
            display.update(step)
        assert display.eta_s() == pytest.approx(800.0)


@settings(max_examples=50)
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=50),
    st.integers(1, 60),
)
def test_sparkline_has_the_width_and_order_of_its_values(values, width):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= {*SPARKS, " "}
    if width >= len(values):
        for value, mark in zip(values, line, strict=True):
            assert (mark == " ") == (not math.isfinite(value))
        marks = [(v, m) for v, m in zip(values, line, strict=True) if math.isfinite(v)]
        ordered = [mark for _, mark in sorted(marks)]
        assert ordered == sorted(ordered)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (3725, "1h 02m"), (90000, "1d 01h")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("code", "step", "told"),
    [
        (0, 7, "done: 7 steps in {}; curves in here"),
        (43, 7, "stopped after step 7; everything is saved in {}. Run the same"),
        (43, 0, "stopped before the first step; nothing is saved in {} yet. Run the same"),
    ],
)
def test_the_end_of_a_session_names_the_run_as_it_is(monkeypatch, capsys, code, step, told):
    """In one line, also in a log file; brackets are no markup."""
    folder = "/data/a long folder for many runs of a long name/[draft]/with more of it behind/a"
    run = SimpleNamespace(
        dir=folder,
        limits=SimpleNamespace(session_hours=9.0, total_hours=None),
        eval=SimpleNamespace(first="never"),
    )
    outcome = Outcome(step=step, exit_code=code, losses=[])
    monkeypatch.setattr(command, "train", lambda *_, **__: outcome)
    monkeypatch.setattr(command, "write_report", lambda *_: "here")
    assert command.train_command(run) == code
    assert told.format(folder) in capsys.readouterr().out


OUTPUT_FAILS = (
    "import sys\n"
    "from lmwright.train.display import Display\n"
    "from lmwright.train.signals import StopRequest\n"
    "from tests.train.bare_run import make_run\n"
    "stop = StopRequest()\n"
    "stop.starting = False\n"
    "display = Display(make_run(), 10, 0, process_index=0, stop=stop)\n"
    "for step in (1, 2):\n"
    "    display.update(step, loss=1.0)\n"
    "sys.exit(stop.exit_code)"
)


def test_a_run_whose_output_nobody_reads_is_asked_to_save():
    """The reader of a pipe that is gone ends no session, whose last steps would be lost."""
    with subprocess.Popen(
        [sys.executable, "-c", OUTPUT_FAILS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        child.stdout.close()
        said = child.stderr.read().decode()
        assert (said.count("\n"), child.wait(60)) == (1, EXIT_UNREAD), said
    assert "saving" in said


def test_a_run_whose_log_file_cannot_be_written_goes_on():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", OUTPUT_FAILS], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("No space left on device; training continues without it\n")
    assert done.stderr.count("\n") == 1
