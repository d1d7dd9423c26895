"""Training that begins with the first portion has the losses of one on all, to the last bit."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lmwright.config.load import dump_toml
from lmwright.config.run import Checkpoint, Eval, Limits, Mesh, Metrics, Train
from lmwright.data.portions import PORTIONS, folder_of, parse_portions
from lmwright.data.prepare import prepare
from lmwright.errors import EXIT_INTERRUPTED, UserError
from lmwright.train import portions
from lmwright.train.session import train
from lmwright.train.signals import EXIT_SESSION_OVER, StopRequest
from tests.data.portioned import COUNT, T, data_of, write_corpus
from tests.resume.small_runs import environment, logged, losses
from tests.resume.test_hosts import outputs, start_two

STEPS = 34


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(corpus, small_run, tmp_path_factory):
    """A run of more than an epoch on portions that are all there, and its losses."""
    root = tmp_path_factory.mktemp("whole")
    data = data_of(corpus, root / "data")
    prepare(data, T)
    run = run_on(small_run, data, root / "run")
    assert train(run, jax.devices()[:1]).exit_code == 0
    return run, losses(run)


def run_on(small_run, data, folder):
    return replace(
        small_run,
        dir=str(folder),
        data=data,
        train=Train(steps=STEPS, global_batch_size=5, precision="fp32"),
        eval=Eval(every_steps=12),
        checkpoint=Checkpoint(save_every_steps=4),
        metrics=Metrics(log_every_steps=1, trackers=()),
    )


@pytest.fixture
def part(whole, tmp_path):
    """A run as the whole one, whose first portion alone is there."""
    run = whole[0]
    run = replace(
        run, dir=str(tmp_path / "run"), data=replace(run.data, dir=str(tmp_path / "data"))
    )
    give(whole, run, 1)
    return run


def give(whole, run, count):
    """Makes the first portions of a run's data be there."""
    source, target = Path(whole[0].data.dir), Path(run.data.dir)
    for number in range(count):
        shutil.copytree(source / folder_of(number), target / folder_of(number), dirs_exist_ok=True)
    told = parse_portions((source / PORTIONS).read_bytes(), "")
    write(run, replace(told, finished=told.finished[:count]))


def write(run, told):
    (Path(run.data.dir) / PORTIONS).write_bytes(told.to_json())


def at_each_look(monkeypatch, do, clock=time.monotonic):
    """Calls a function, in place of the wait between looks at a missing portion."""
    own = SimpleNamespace(sleep=lambda seconds: do(), monotonic=clock)
    monkeypatch.setattr(portions, "time", own)


def test_training_starts_with_the_first_portion_and_waits(whole, part, monkeypatch, capsys):
    looks = []

    def do():
        looks.append(1)
        if len(looks) in (3, 5):
            give(whole, part, 2 if len(looks) == 3 else 3)

    at_each_look(monkeypatch, do)
    beats = []
    monkeypatch.setattr(portions, "beat", beats.append)
    assert train(part, jax.devices()[:1]).exit_code == 0
    assert losses(part) == whole[1] and len(losses(part)) == STEPS
    assert len(looks) == 5 and beats == ["wait"] * 5
    out = capsys.readouterr().out
    assert out.count("which `lmwright prepare` makes") == 2 and "waiting for portion 2 of 3" in out
    steps = [event["step"] for event in logged(part, "waited for data")]
    assert steps == [47 // 5, 94 // 5]  # the last steps whose rows lie in the portions before


def test_a_stop_while_waiting_saves_and_the_run_goes_on(whole, part, monkeypatch):
    stop = StopRequest()

    def do():
        stop.exit_code = EXIT_INTERRUPTED

    at_each_look(monkeypatch, do)
    outcome = train(part, jax.devices()[:1], stop=stop)
    assert (outcome.step, outcome.exit_code) == (47 // 5, EXIT_INTERRUPTED)
    stop = StopRequest()  # and before the first step of a session there is nothing to save
    assert train(part, jax.devices()[:1], stop=stop).step == 47 // 5
    give(whole, part, 3)
    assert train(part, jax.devices()[:1]).exit_code == 0
    assert losses(part) == whole[1]


def test_a_limit_ends_a_wait(part, monkeypatch):
    part = replace(part, limits=Limits(session_hours=1.0, margin_minutes=0.0))
    clock = [0.0]
    at_each_look(monkeypatch, lambda: clock.append(3000.0))
    from lmwright.train.budget import Budget

    monkeypatch.setattr(Budget, "used_s", property(lambda self: sum(clock)))
    outcome = train(part, jax.devices()[:1])
    assert (outcome.step, outcome.exit_code) == (47 // 5, EXIT_SESSION_OVER)


def test_nothing_that_changes_is_told_with_the_command(part, monkeypatch, capsys):
    now, stop = [0.0], StopRequest()

    def do():
        now[0] += 100.0
        if now[0] < 500:
            folder = Path(part.data.dir) / folder_of(1)
            folder.mkdir(exist_ok=True)
            (folder / f"{now[0]}").write_text("")
        if now[0] > 1300:
            stop.exit_code = EXIT_INTERRUPTED

    at_each_look(monkeypatch, do, lambda: now[0])
    train(part, jax.devices()[:1], stop=stop)
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("nothing has changed there for 10 minutes; run `lmwright prepare") == 1


def test_a_portion_that_changed_is_refused(whole, part, monkeypatch):
    give(whole, part, 2)
    stop = StopRequest()
    at_each_look(monkeypatch, lambda: setattr(stop, "exit_code", EXIT_INTERRUPTED))
    assert train(part, jax.devices()[:1], stop=stop).step == 94 // 5
    give(whole, part, 3)
    told = parse_portions((Path(part.data.dir) / PORTIONS).read_bytes(), "")
    first, second, third = told.finished
    other = replace(second, fingerprint=third.fingerprint)
    write(part, replace(told, finished=(first, other, third)))
    with pytest.raises(UserError, match="portion 2 is not what was trained on"):
        train(part, jax.devices()[:1])
    write(part, replace(told, finished=(first,)))  # and also one that comes later
    at_each_look(monkeypatch, lambda: write(part, replace(told, finished=(first, other, third))))
    with pytest.raises(UserError, match="portion 2 is not what was trained on"):
        train(part, jax.devices()[:1])
    write(part, replace(told, finished=(replace(first, fingerprint="x"), second)))
    with pytest.raises(UserError, match=r"is not the portion that portions\.json lists"):
        train(part, jax.devices()[:1])
    write(part, told)
    assert train(part, jax.devices()[:1]).exit_code == 0
    assert losses(part) == whole[1]


SLOW = """
    import time
    import lmwright.data.text.normalize as normalize
    read_rows = normalize.read_rows
    def slowly(piece, source):
        for row in read_rows(piece, source):
            time.sleep(0.1)
            yield row
    normalize.read_rows = slowly
    from lmwright.cli.main import main
    raise SystemExit(main(["prepare", {file!r}]))
"""


@pytest.mark.slow
def test_two_processes_that_are_killed_and_go_on(whole, tmp_path):
    data = replace(whole[0].data, dir=str(tmp_path / "data"))
    run = replace(whole[0], dir=str(tmp_path / "run"), data=data)
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(run))
    preparing = [sys.executable, "-c", textwrap.dedent(SLOW.format(file=str(file)))]
    training = [sys.executable, "-m", "lmwright", "train", str(file)]

    def start(words):
        with open(tmp_path / "log", "a") as log:
            return subprocess.Popen(words, env=environment(), cwd=tmp_path, stdout=log, stderr=log)

    def listed():
        path = tmp_path / "data" / PORTIONS
        return len(parse_portions(path.read_bytes(), "").finished) if path.exists() else 0

    def until(condition):
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.1)

    def steps():
        return len(losses(run)) if (tmp_path / "run" / "metrics.jsonl").exists() else 0

    prepare_ = start(preparing)
    until(lambda: listed() >= 1)
    train_ = start(training)
    until(lambda: "waiting for portion" in (tmp_path / "log").read_text())
    assert listed() < COUNT and 0 < steps() < STEPS
    for process in (prepare_, train_):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    prepare_, train_ = start(preparing), start(training)
    assert prepare_.wait(120) == 0, (tmp_path / "log").read_text()
    assert train_.wait(120) == 0, (tmp_path / "log").read_text()
    assert losses(run) == whole[1]
    for number in range(COUNT):
        name = f"{folder_of(number)}/shuffle/manifest.json"
        assert Path(data.dir, name).read_bytes() == Path(whole[0].data.dir, name).read_bytes()


@pytest.mark.slow
def test_two_hosts_wait_for_each_other_and_stop_together(whole, part):
    run = replace(part, mesh=Mesh(data=2, fsdp=4))
    run = replace(run, train=replace(run.train, global_batch_size=8))
    metrics = Path(run.dir) / "metrics.jsonl"

    def until(step, processes):
        end = time.monotonic() + 200
        while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
            assert time.monotonic() < end and all(p.poll() is None for p in processes)
            time.sleep(0.2)
        time.sleep(3)  # they wait

    processes = start_two(run)
    until(47 // 8, processes)
    give(whole, run, 2)
    until(94 // 8, processes)
    processes[1].send_signal(signal.SIGTERM)
    said = outputs(processes, [42, 42])
    assert "waiting for portion 3 of 3" in said[0] and "waiting" not in said[1]
    assert f"stopped after step {94 // 8};" in said[0]
    give(whole, run, 3)
    outputs(start_two(run), [0, 0])
    alone = replace(run, dir=f"{run.dir}-alone")
    assert train(alone).exit_code == 0
    expected = losses(alone)
    assert len(expected) == STEPS
    np.testing.assert_allclose(list(losses(run).values()), list(expected.values()), rtol=1e-5)
