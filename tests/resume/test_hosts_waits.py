"""Processes that train together, of which one waits for its rows, stop when any is asked to."""

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lmwright.checkpoint.saved import SavedStates
from lmwright.config.run import Eval, Mesh
from tests.resume.small_runs import in_dir, losses
from tests.resume.test_hosts import outputs, start_two

pytestmark = pytest.mark.slow  # processes that compile

AWAY = """
import os, threading
from lmwright.data.rows import loader, shards
hurried = threading.Event()
shards.LocalPlace.hurry = lambda self, told: hurried.set() if told else None
make = loader.Loader._make
def away(self, step):
    if step >= {step} and os.environ["JAX_PROCESS_ID"] == "1":
        hurried.wait({most})
    return make(self, step)
loader.Loader._make = away
"""


def long_run(small_run, folder, **train):
    run = replace(in_dir(small_run, folder), mesh=Mesh(data=2, fsdp=4), eval=Eval())
    return replace(run, train=replace(run.train, global_batch_size=16, **train))


@pytest.mark.parametrize(
    ("told", "number", "code", "step"),
    [(0, signal.SIGINT, 130, 4), (1, signal.SIGTERM, 42, 4), (1, signal.SIGINT, 130, 0)],
)
def test_a_stop_does_not_wait_for_late_rows(small_run, tmp_path, told, number, code, step):
    """Whichever of them is told; process 1 is late."""
    run = long_run(small_run, tmp_path / "run", steps=100_000)
    processes = start_two(run, AWAY.format(step=step, most=600))
    metrics, began = Path(run.dir) / "metrics.jsonl", time.monotonic()
    kind = '"compile"' if step == 0 else f'"step": {step},'
    while not (metrics.exists() and kind in metrics.read_text()):
        assert time.monotonic() - began < 200 and processes[0].poll() is None
        time.sleep(0.5)
    time.sleep(5)  # they are in the wait by now
    processes[told].send_signal(number)
    said = outputs(processes, [code, code], timeout_s=90)
    assert f"stopped after step {step};" in said[0] if step else "nothing is saved" in said[0]
    assert SavedStates(Path(run.dir)).steps()[-1:] == ([step] if step else [])


def test_rows_that_are_late_come(small_run, tmp_path):
    run, other = (long_run(small_run, tmp_path / name, steps=6) for name in ("late", "same"))
    outputs(start_two(run, AWAY.format(step=3, most=4)), [0, 0])
    outputs(start_two(other), [0, 0])
    assert losses(run) == losses(other)
