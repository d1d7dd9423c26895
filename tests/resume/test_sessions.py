"""Sessions that end by their limits, one after the other, are one run."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.checkpoint.saved import SavedStates
from lmwright.config.run import Limits
from lmwright.formats.weights import load_run_weights
from lmwright.report.ledger import LEDGER
from lmwright.train import compiled, session
from lmwright.train.budget import Budget, read_ledger
from lmwright.train.command import describe_stop
from lmwright.train.signals import EXIT_SESSION_OVER, EXIT_TIME_SPENT
from tests.resume.small_runs import in_dir, train_in_process


class Ticking:
    """A clock on which every look takes a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.mark.slow
def test_a_run_in_sessions_is_the_run_in_one(small_run, tmp_path, monkeypatch):
    one = jax.devices()[:1]
    compile_step = compiled.load_or_compile
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "load_or_compile", lambda *a: (time.sleep(5), compile_step(*a))[1])
        whole = session.train(in_dir(small_run, tmp_path / "whole"), one)
    assert whole.exit_code == 0
    (entry,) = read_ledger(tmp_path / "whole" / LEDGER)
    assert entry["step_s"] < 5, "compiling is no step"
    clock = Ticking()

    class Ticked(Budget):
        """By that clock."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options, clock=clock)

    monkeypatch.setattr(session, "Budget", Ticked)
    limits = Limits(session_hours=22 / 3600, margin_minutes=0.0)
    parted = replace(in_dir(small_run, tmp_path / "parted"), limits=limits)
    steps, codes = [], []
    for _ in range(8):
        done = session.train(parted, one, began=clock())
        steps.append(done.step)
        codes.append(done.exit_code)
        if not done.exit_code:
            break
    assert codes[-1] == 0 and len(codes) > 1 and set(codes[:-1]) == {EXIT_SESSION_OVER}
    assert steps == sorted(set(steps)) and steps[-1] == small_run.train.steps
    ends = [entry["end"] for entry in read_ledger(tmp_path / "parted" / LEDGER)]
    assert ends == ["session limit"] * (len(codes) - 1) + ["done"]
    jax.tree.map(
        np.testing.assert_array_equal,
        *(load_run_weights(tmp_path / name)[1] for name in ("whole", "parted")),
    )


def test_a_spent_total_does_nothing(small_run, tmp_path):
    run = replace(in_dir(small_run, tmp_path), limits=Limits(total_hours=1.0))
    (tmp_path / LEDGER).write_text(json.dumps([{"seconds": 3599.0}]))
    done = session.train(run, jax.devices()[:1])
    assert (done.step, done.exit_code) == (0, EXIT_TIME_SPENT)
    assert "limits.total_hours = 1 are spent" in describe_stop(run, done)


def test_a_clock_that_is_set_back_changes_nothing(small_run, tmp_path, monkeypatch):
    now, one = iter(range(2_000_000_000, 0, -3600)), jax.devices()[:1]
    run = replace(in_dir(small_run, tmp_path), train=replace(small_run.train, steps=2))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    began = time.monotonic()
    assert session.train(run, one).exit_code == 0
    assert session.train(replace(run, train=small_run.train), one).step == small_run.train.steps
    spent = [entry["seconds"] for entry in read_ledger(tmp_path / LEDGER)]
    assert len(spent) == 2 and min(spent) > 0 and sum(spent) <= time.monotonic() - began


def jump_in_saves(monkeypatch, jumps):
    """The clock leaps two hours inside each of the first saves, as NTP may let it."""
    real, ahead = time.time, []

    def now():
        inside = sys._getframe(1).f_code.co_name == "get_remaining_time"  # Orbax waits by it
        value = real() + 7200 * len(ahead)
        if inside and len(ahead) < jumps:
            ahead.append(value)
        return value

    monkeypatch.setattr(time, "time", now)
    return ahead


@pytest.mark.parametrize("jumps", [1, 3])
def test_a_clock_that_jumps_forward_in_a_save(small_run, tmp_path, monkeypatch, jumps):
    ahead = jump_in_saves(monkeypatch, jumps)
    run = in_dir(small_run, tmp_path)
    done = session.train(run, jax.devices()[:1])
    assert len(ahead) == jumps
    assert (done.step, done.exit_code) == (run.train.steps, 0)
    assert SavedStates(tmp_path).steps()[-1] == run.train.steps


def test_a_damaged_ledger_still_counts(small_run, tmp_path, capsys):
    run = replace(in_dir(small_run, tmp_path), limits=Limits(total_hours=1.0))
    (tmp_path / LEDGER).write_text(json.dumps([{"seconds": 3599.0}, 5, {"seconds": -7062}]))
    assert session.train(run, jax.devices()[:1]).exit_code == EXIT_TIME_SPENT
    assert "sessions.json: is damaged; 2 sessions of 1 hours" in capsys.readouterr().out


@pytest.mark.slow
def test_by_the_real_clock_and_from_the_command_line(small_run, tmp_path):
    limits = Limits(session_hours=60 / 3600, margin_minutes=0.1)
    run = replace(
        in_dir(small_run, tmp_path),
        limits=limits,
        train=replace(small_run.train, steps=10_000_000),
        eval=replace(small_run.eval, every_steps=None),
        checkpoint=replace(small_run.checkpoint, save_every_steps=10_000_000),
    )
    reached = 0
    for number in (1, 2):
        began = time.time()
        done = train_in_process(run)
        took = time.time() - began
        assert done.returncode == EXIT_SESSION_OVER, done.stderr
        assert "limits.session_hours" in done.stdout
        ledger = read_ledger(Path(run.dir) / LEDGER)
        assert len(ledger) == number and ledger[-1]["end"] == "session limit"
        assert ledger[-1]["first_step"] == reached < ledger[-1]["last_step"]
        assert 40 < took < 70 and ledger[-1]["seconds"] <= 60
        reached = ledger[-1]["last_step"]
    assert os.listdir(tmp_path / "checkpoints")
