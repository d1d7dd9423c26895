"""Nothing is lost: a run killed anywhere and started again ends as if it never stopped."""

import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.config.run import Checkpoint
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.train import session
from lmwright.train.hooks import Hook
from lmwright.train.session import train
from lmwright.train.signals import StopRequest
from tests.resume.small_runs import STEPS, in_dir, losses, train_in_process

KILL_IN_STEP = """
    import os, signal
    from lmwright.train.hooks import HOOKS, Hook
    class Kill(Hook):
        def after_step(self, session, done):
            if done == {step} + 1:
                os.kill(os.getpid(), signal.{signal})
    HOOKS.append(Kill())
"""
KILL_AFTER_SAVE = """
    import os, signal
    from lmwright.train.hooks import HOOKS, Hook
    class Kill(Hook):
        def after_save(self, session, step):
            if step == {step}:
                os.kill(os.getpid(), signal.SIGKILL)
    HOOKS.append(Kill())
"""


@pytest.fixture(scope="module")
def uninterrupted(trained_run):
    return trained_run, losses(trained_run)


class Signal(Hook):
    """Sends this process a signal after a step."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def after_step(self, session, done):
        if done == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(KILL_IN_STEP.format(step=0, signal="SIGKILL"), marks=pytest.mark.slow),
        KILL_IN_STEP.format(step=7, signal="SIGKILL"),
        KILL_AFTER_SAVE.format(step=6),  # while the save is in flight
    ],
)
def test_a_killed_run_ends_bit_for_bit_the_same(small_run, uninterrupted, tmp_path, before):
    run = in_dir(small_run, tmp_path / "run")
    assert train_in_process(run, before).returncode == -9
    assert train(run, jax.devices()[:1]).exit_code == 0
    found = losses(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found == uninterrupted[1]
    assert final_weights(run) == final_weights(uninterrupted[0])


@pytest.mark.slow  # two processes
def test_a_resumed_run_finds_its_step_in_jaxs_cache(small_run, tmp_path, monkeypatch):
    """Which on a GPU is one of several that the compiler might choose."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    steps = lambda: sorted((tmp_path / "compiled").glob("jit_train_step-*-cache"))  # noqa: E731
    run = in_dir(small_run, tmp_path / "run")
    assert train_in_process(run, KILL_IN_STEP.format(step=7, signal="SIGKILL")).returncode == -9
    (kept,) = steps()
    made = kept.stat().st_mtime_ns
    assert train_in_process(run).returncode == 0
    assert steps() == [kept] and kept.stat().st_mtime_ns == made


def final_weights(run):
    from lmwright.formats.weights import load_run_weights

    _, w = load_run_weights(run.dir)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(w)]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 42), (signal.SIGHUP, 42)]
)
def test_asked_to_stop_it_saves_and_says_how_to_go_on(
    small_run, uninterrupted, one_device, tmp_path, monkeypatch, capsys, number, code
):
    run = in_dir(small_run, tmp_path / "run")
    (tmp_path / "run.toml").write_text(dump_toml(run))
    with monkeypatch.context() as patch:
        patch.setattr(session, "HOOKS", [Signal(5, number)])
        assert main(["train", str(tmp_path / "run.toml")]) == code
    said = capsys.readouterr().out
    assert "stopped after step 5" in said and "again to continue" in " ".join(said.split())
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    assert "continuing from step 5" in capsys.readouterr().out
    assert losses(run) == uninterrupted[1]


def test_the_exit_code_of_a_process_that_is_asked_to_stop(small_run, tmp_path):
    run = in_dir(small_run, tmp_path / "run")
    stopped = train_in_process(run, KILL_IN_STEP.format(step=4, signal="SIGTERM"))
    assert stopped.returncode == 42, stopped.stderr
    assert "stopped after step 5" in stopped.stdout


def test_a_signal_in_a_callback_that_drops_exceptions_is_not_lost(monkeypatch):
    class Collected:
        def __del__(self):  # as jax's callback of the collector
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with StopRequest() as stop:
        Collected()
        assert stop.asked() and stop.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


TOLD_EARLY = """
    import os, signal, sys, time
    import {module} as place
    def told(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    place.{name} = told
    from lmwright.cli.main import main
    raise SystemExit(main(["train", {file!r}]))
"""


@pytest.mark.parametrize(
    "module, name",
    [
        ("lmwright.formats.open", "load_noted"),
        pytest.param("lmwright.train.session", "restore_or_init", marks=pytest.mark.slow),
    ],
)
def test_told_to_stop_before_the_first_step_it_ends_at_once(small_run, tmp_path, module, name):
    run = in_dir(small_run, tmp_path / "run")
    file = str(Path(run.dir).with_suffix(".toml"))
    began = time.monotonic()
    done = train_in_process(run, TOLD_EARLY.format(module=module, name=name, file=file))
    assert done.returncode == 42 and time.monotonic() - began < 50
    (line,) = done.stderr.splitlines()
    assert "stopped before the first step; run the same command again" in line


IN_A_TERMINAL = """
    import os, pty, sys
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-m", "lmwright", "train", {file!r}])
    seen = b""
    while b"step 3" not in seen:
        seen += os.read(terminal, 1000)
    os.close(terminal)  # the child gets SIGHUP, and cannot print any more
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.slow
def test_a_terminal_that_is_gone_loses_nothing(small_run, tmp_path):
    run = in_dir(small_run, tmp_path / "run")
    run = replace(run, train=replace(run.train, steps=10**7), checkpoint=Checkpoint())
    file = str(Path(run.dir).with_suffix(".toml"))
    done = train_in_process(run, IN_A_TERMINAL.format(file=file))
    assert done.returncode == 42, done.stderr
    (saved,) = (Path(run.dir) / "checkpoints").iterdir()
    assert int(saved.name) == max(losses(run))


@pytest.mark.parametrize(
    "harm",
    ["flip", pytest.param("truncate", marks=pytest.mark.slow), "remove"],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(
    small_run, uninterrupted, tmp_path, harm, capsys
):
    run = in_dir(small_run, tmp_path / "run")
    train(replace(run, train=replace(run.train, steps=STEPS)), jax.devices()[:1])
    newest = Path(run.dir) / "checkpoints" / str(STEPS)
    largest = max(newest.rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    elif harm == "truncate":
        largest.write_bytes(content[:-7])
    else:
        largest.unlink()
    capsys.readouterr()
    outcome = train(run, jax.devices()[:1])
    said = " ".join(capsys.readouterr().out.split())
    assert f"checkpoint {STEPS} is damaged" in said
    assert largest.name in said
    assert outcome.step == STEPS
    assert losses(run) == uninterrupted[1]
    assert (Path(run.dir) / "checkpoints.damaged" / str(STEPS)).is_dir()


def test_a_moved_run_directory_continues_where_it_is(
    small_run, uninterrupted, one_device, tmp_path, monkeypatch, capsys
):
    run = in_dir(small_run, tmp_path / "a")
    assert train(run, jax.devices()[:1], hooks=[Signal(8, signal.SIGTERM)]).exit_code == 42
    (tmp_path / "a").rename(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "b"]) == 0
    said = "".join(capsys.readouterr())
    assert "continuing from step" in said and "where it was before" in said
    assert not (tmp_path / "a").exists()
    assert losses(in_dir(run, tmp_path / "b")) == uninterrupted[1]
    assert final_weights(in_dir(run, tmp_path / "b")) == final_weights(uninterrupted[0])
    assert 'dir = "b"' in (tmp_path / "b" / "run.toml").read_text()


def test_it_opens_with_what_is_trained_and_soon_says_how_long(small_run, tmp_path, capsys):
    run = in_dir(small_run, tmp_path / "run")
    train(replace(run, metrics=replace(run.metrics, log_every_steps=100)), jax.devices()[:1])
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"small: llama, [\d,]+ parameters, 12 steps of 128 tokens on 1 x cpu", said[0]
    )
    assert any(re.fullmatch(r"step 2/12  ETA \d+s", line) for line in said)


def test_a_run_file_beside_no_run_keeps_its_dir(small_run, tmp_path):
    (tmp_path / "run.toml").write_text(dump_toml(in_dir(small_run, tmp_path / "run")))
    (tmp_path / "checkpoints").mkdir()
    assert load_run(tmp_path).dir == str(tmp_path / "run")


def test_the_users_own_run_file_is_not_replaced(small_run, one_device, tmp_path, capsys):
    """It has the name that a run directory's has."""
    text = "# my comment\n" + dump_toml(in_dir(small_run, tmp_path))
    (tmp_path / "run.toml").write_text(text)
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    assert "run.toml would be replaced by the settings of this run" in capsys.readouterr().err
    assert (tmp_path / "run.toml").read_text() == text
    assert {path.name for path in tmp_path.iterdir()} - before <= {".lock"}


def test_it_goes_on_with_another_mesh(small_run, uninterrupted, tmp_path):
    run = in_dir(small_run, tmp_path / "run")
    assert train(run, jax.devices()[:1], hooks=[Signal(5, signal.SIGTERM)]).exit_code == 42
    outcome = train(run, jax.devices()[:2])
    assert outcome.step == STEPS
    found = losses(run)
    for step, loss in uninterrupted[1].items():
        assert found[step] == pytest.approx(loss, rel=1e-4), step


def test_more_steps_go_on_from_the_end(small_run, tmp_path):
    run = in_dir(small_run, tmp_path / "run")
    short = replace(run, train=replace(run.train, steps=4))
    assert train(short, jax.devices()[:1]).step == 4
    assert train(run, jax.devices()[:1]).step == STEPS
    assert sorted(losses(run)) == list(range(1, STEPS + 1))


def test_a_directory_of_another_run_is_refused(uninterrupted, one_device, monkeypatch, capsys):
    folder = Path(uninterrupted[0].dir)
    monkeypatch.chdir(folder.parent)
    (folder.parent / "run.toml").write_text(dump_toml(uninterrupted[0]))
    words = ["optim.learning_rate=1e-4", "model.mlp_dim=56"]
    assert main(["train", "run.toml", *words]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "optim.learning_rate is 0.003 there and 0.0001 here" in said
    assert "model.mlp_dim is 48 there and 56 here" in said
    assert "delete" not in said
    assert main(re.search(r"`lmwright (train .*?)`", said)[1].split()) == 0
    assert "done: 12 steps" in capsys.readouterr().out


def test_a_lost_run_file_is_in_the_checkpoint(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted[0].dir, folder)
    (folder / "run.toml").unlink()
    run = replace(uninterrupted[0], dir=str(folder))
    other = replace(run, model=replace(run.model, mlp_dim=56))
    with pytest.raises(UserError, match=r"model.mlp_dim is 48 there and 56 here"):
        train(other, jax.devices()[:1])
    assert train(run, jax.devices()[:1]).step == 12 and load_run(folder / "run.toml") == run
    (folder / "run.toml").unlink()
    (folder / "checkpoints/12/meta/metadata").write_text("{}")
    with pytest.raises(UserError, match=r"no run.toml, and its newest checkpoint does not"):
        train(run, jax.devices()[:1])


def test_a_checkpoint_of_another_shape_is_refused(small_run, uninterrupted):
    from lmwright.checkpoint.store import Checkpoints
    from lmwright.program.plan import resolve
    from lmwright.program.state import abstract_state, saved

    model = replace(small_run.model, mlp_dim=56)
    plan = resolve(replace(small_run, model=model), jax.devices()[:1])
    with (
        Checkpoints(Path(uninterrupted[0].dir), small_run.checkpoint) as checkpoints,
        pytest.raises(UserError, match=re.escape("'down'")),
    ):
        checkpoints.restore(saved(abstract_state(plan)))


def test_two_processes_never_train_one_directory(small_run, tmp_path):
    from lmwright.program.plan import resolve
    from lmwright.train.rundir import claim

    run = in_dir(small_run, tmp_path / "run")
    plan = resolve(run, jax.devices()[:1])
    with claim(run, plan), pytest.raises(UserError, match="another process"), claim(run, plan):
        pass


def test_policies_of_keeping(small_run, tmp_path):
    run = in_dir(small_run, tmp_path / "run")
    policy = replace(run.checkpoint, save_every_steps=2, keep_last=1, keep_every_steps=4)
    train(replace(run, checkpoint=policy), jax.devices()[:1])
    kept = sorted(int(p.name) for p in (Path(run.dir) / "checkpoints").iterdir())
    assert kept == [4, 8, 12]
    for step in kept:
        assert json.loads((Path(run.dir) / f"checkpoints/{step}/hashes.json").read_text())


def test_a_refused_run_leaves_no_folder(small_run, tmp_path):
    run = in_dir(small_run, tmp_path / "run")
    huge = replace(run, train=replace(run.train, global_batch_size=4096))
    with pytest.raises(UserError, match=r"global_batch_size = 4096.*rows for training"):
        train(huge, jax.devices()[:1])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"xla_nope": "true"}, r"^train.compiler_options.xla_nope: .*no such option; remove it"),
        (
            {"xla_cpu_enable_fast_math": "maybe"},
            r"fast_math: 'maybe' is not a valid bool; correct or remove it",
        ),
    ],
)
def test_a_wrong_compiler_option_is_named(small_run, tmp_path, options, message):
    told = replace(small_run.train, compiler_options=options, global_batch_size=16)
    with pytest.raises(UserError, match=message):
        train(replace(in_dir(small_run, tmp_path / "run"), train=told))


def test_fewer_steps_than_are_done_are_told(trained_run, tmp_path, capsys):
    shutil.copytree(trained_run.dir, tmp_path / "run")
    short = in_dir(trained_run, tmp_path / "run")
    short = replace(short, train=replace(short.train, steps=STEPS - 1))
    assert train(short, jax.devices()[:1]).step == STEPS
    told = f"{STEPS} steps are done already, and {STEPS - 1} are asked for: nothing is trained"
    assert told in " ".join(capsys.readouterr().out.split())
