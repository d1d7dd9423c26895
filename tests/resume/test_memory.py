"""States in the host's memory: a process that died goes on from there, and nothing else does."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.checkpoint.memory import VARIABLE, MemoryTier
from lmwright.checkpoint.saved import SavedStates
from lmwright.config.run import Checkpoint, Eval
from lmwright.errors import UserError
from lmwright.train.hooks import Hook
from lmwright.train.session import train
from tests.resume.small_runs import STEPS, in_dir, logged, losses
from tests.resume.test_resume import Signal

KILLED = 9


class Killed(BaseException):
    """The process ends without a word."""


class Kill(Signal):
    def after_step(self, session, done):
        if done == self.step:
            raise Killed


@pytest.fixture
def run(small_run, tmp_path, monkeypatch):
    """A run that keeps a state every 2 steps and saves at 6, killed after step 9."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "memory"))
    checkpoint = Checkpoint(save_every_steps=6, memory_every_steps=2)
    run = replace(in_dir(small_run, tmp_path / "run"), checkpoint=checkpoint)
    with pytest.raises(Killed):
        train(run, jax.devices()[:2], hooks=[Kill(KILLED, 0)])
    return run


@pytest.fixture(scope="module")
def expected(small_run, tmp_path_factory):
    run = in_dir(small_run, tmp_path_factory.mktemp("calm") / "run")
    assert train(run, jax.devices()[:2]).exit_code == 0
    return losses(run)


def resumed_at(run):
    lines = (Path(run.dir) / "metrics.jsonl").read_text().splitlines()
    return [entry["step"] for entry in map(json.loads, lines) if entry["kind"] == "resume"]


def kept(run):
    return sorted(Path(run.dir).parent.glob("memory/*/*/host-0/*"), key=lambda p: int(p.name))


def test_it_goes_on_from_memory_bit_for_bit(run, expected):
    assert [path.name for path in kept(run)] == ["6", "8"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept(run))
    assert train(run, jax.devices()[:2]).exit_code == 0
    assert resumed_at(run) == [8]
    assert losses(run) == expected
    assert not kept(run)  # the run is done


def test_it_goes_on_with_moments_on_the_host(small_run, expected, tmp_path, monkeypatch):
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "memory"))
    optim = replace(small_run.optim, offload="moments")
    checkpoint = Checkpoint(save_every_steps=100, memory_every_steps=2)
    run = replace(in_dir(small_run, tmp_path / "run"), optim=optim, checkpoint=checkpoint)
    with pytest.raises(Killed):
        train(run, jax.devices()[:2], hooks=[Kill(KILLED, 0)])
    assert train(run, jax.devices()[:2]).exit_code == 0
    assert resumed_at(run) == [8]
    assert losses(run) == expected


def test_what_was_only_in_memory_is_saved_before_the_run_ends(run):
    """A session may end without a step, and says that everything is saved."""
    shorter = replace(run, train=replace(run.train, steps=8))
    assert train(shorter, jax.devices()[:2]).exit_code == 0
    assert SavedStates(Path(run.dir)).steps() == [6, 8]


class InEvaluation(Hook):
    """Kills the run after a step, before it is evaluated."""

    def after_log(self, session, step, measured):
        if step == 4:
            raise Killed


def test_a_state_in_memory_is_that_of_a_step_that_was_evaluated(run, tmp_path):
    """Otherwise the run that goes on from there would lack an evaluation."""
    run = in_dir(replace(run, eval=Eval(every_steps=2)), tmp_path / "evaluated")
    with pytest.raises(Killed):
        train(run, jax.devices()[:2], hooks=[InEvaluation()])
    assert train(run, jax.devices()[:2]).exit_code == 0
    assert resumed_at(run) == [2]
    assert [line["step"] for line in logged(run, "eval")] == list(range(2, STEPS + 1, 2))


@pytest.mark.parametrize("damage", ["a flipped bit", "cut off", "other devices", "made anew"])
def test_what_cannot_be_used_is_passed_over(run, expected, damage):
    newest, devices, step = kept(run)[-1], jax.devices()[:2], 6
    if damage == "a flipped bit":
        data = bytearray(newest.read_bytes())
        data[-5] ^= 1
        newest.write_bytes(data)
    elif damage == "cut off":
        newest.write_bytes(newest.read_bytes()[:-5])
    elif damage == "other devices":
        devices = jax.devices()[:1]
    else:
        shutil.rmtree(run.dir)
        step = 0
    assert train(run, devices).exit_code == 0
    assert resumed_at(run) == ([step] if step else [])
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    if damage != "other devices":
        assert losses(run) == expected


def test_too_little_memory_is_told_and_training_goes_on(run, monkeypatch, capsys):
    monkeypatch.setattr("lmwright.checkpoint.memory.ROOM", 1e30)
    assert train(run, jax.devices()[:2]).exit_code == 0
    assert "too small to keep states in" in " ".join(capsys.readouterr().out.split())


def test_a_system_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UserError, match="memory_every_steps: there is no"):
        MemoryTier(tmp_path)


def test_a_folder_of_another_user_is_refused(small_run, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    planted = tmp_path / f"lmwright-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="others may write"):
        MemoryTier(tmp_path / "run")


def test_memory_that_others_have_filled_ends_nothing(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "run").mkdir()
    tier, state = MemoryTier(tmp_path / "run"), {"w": jax.numpy.ones(3)}
    assert tier.save(2, state, {})
    tier.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert tier.save(4, state, {})
        tier.wait()
    assert tier.steps() == [2] and not list(tier._folder.glob("*.tmp"))
    assert "Traceback" not in capsys.readouterr().err


def test_later_states_of_other_devices_push_no_new_one_out(tmp_path, monkeypatch):
    """Their session is over: this one goes on from an earlier checkpoint."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "run").mkdir()
    tier, seen = MemoryTier(tmp_path / "run"), []
    state = {"w": jax.numpy.ones(3)}
    for step in (6, 8, 10, 3, 4, 5):
        assert tier.save(step, state, {})
        tier.wait()
        seen.append(tier.steps())
    assert seen == [[6], [6, 8], [8, 10], [3], [3, 4], [4, 5]]
    restored = tier.restore(state, 3)
    assert restored is not None and restored[1]["step"] == 5


def test_a_tier_gives_back_what_it_kept_or_nothing(tmp_path, monkeypatch):
    """The newest whole state, or the one before; none that the checkpoint has, of other shapes or
    of a run directory that was made anew."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "memory"))
    (tmp_path / "run").mkdir()
    state = {"a": jnp.arange(6.0).reshape(2, 3), "n": jnp.int32(7)}
    tier = MemoryTier(tmp_path / "run")
    for step in (2, 4, 6):
        assert tier.save(step, jax.tree.map(lambda leaf, by=step: leaf + by, state), {"of": step})
        tier.wait()
    assert tier.steps() == [4, 6]

    def found(newer_than, like=state):
        if (restored := tier.restore(like, newer_than)) is None:
            return None
        jax.tree.map(
            np.testing.assert_array_equal,
            restored[0],
            jax.tree.map(lambda leaf: leaf + restored[1]["of"], state),
        )
        return restored[1]["step"]

    assert [found(newer_than) for newer_than in (3, 5, 6)] == [6, 6, None]
    assert found(3, state | {"a": state["a"].T}) is None
    (newest,) = tmp_path.glob("memory/*/*/host-0/6")
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    assert [found(newer_than) for newer_than in (3, 4)] == [4, None]
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert MemoryTier(tmp_path / "run").restore(state, 0) is None
