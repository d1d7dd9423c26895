"""Heartbeats where a run does not step: each batch of an evaluation, and while it publishes."""

import math
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from lmwright.config.run import Publish
from lmwright.data.rows.store import TokenStore
from lmwright.evals import held_out
from lmwright.guard import heartbeat
from lmwright.train import publishing
from lmwright.train.session import train
from tests.resume.small_runs import in_dir


@pytest.fixture
def beats(monkeypatch):
    told = []
    for module in (held_out, heartbeat, publishing):
        monkeypatch.setattr(module, "beat", lambda phase, **_: told.append(phase))
    return told


def test_each_batch_of_an_evaluation_beats(small_run, tmp_path, beats):
    run = in_dir(small_run, tmp_path / "run")
    assert train(run, jax.devices()[:1]).exit_code == 0
    store, rows = TokenStore.open(run.data.dir), 2  # of a microbatch
    batches = sum(math.ceil(store.eval_rows(source) / rows) for source in store.eval_sources)
    assert batches > 1 and beats.count("eval") == 2 * batches  # at steps 6 and 12


def test_a_process_that_publishes_beats(small_run, tmp_path, beats, monkeypatch):
    monkeypatch.setattr(publishing, "PATIENCE_S", 0.01)
    run = replace(small_run, publish=Publish(repo="me/small", license="mit"))
    publisher = publishing.Publisher(run, tmp_path)
    attempt = threading.Thread(target=time.sleep, args=(0.2,))
    attempt.step, attempt.problem = 4, ""
    attempt.start()
    publisher._attempt = attempt
    session = SimpleNamespace(
        display=SimpleNamespace(note=print),
        stop=SimpleNamespace(exit_code=None),
        metrics=SimpleNamespace(event=lambda *_, **__: None),
    )
    assert publisher._wait(session) == 4
    assert beats.count("end") > 3


def test_a_process_that_waits_for_another_beats(beats, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    with heartbeat.beating("end"):
        time.sleep(0.2)
    count = beats.count("end")
    assert count > 3
    time.sleep(0.05)
    assert beats.count("end") == count
