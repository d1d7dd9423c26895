"""A spike is skipped like a fault, or takes the run back to its newest checkpoint's weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lmwright.checkpoint.memory import VARIABLE
from lmwright.config.run import Checkpoint
from lmwright.errors import UserError
from lmwright.optim import KINDS
from lmwright.optim.kinds import Constant
from lmwright.program.lora import resolved
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.state import RECENT
from lmwright.program.step import spike
from lmwright.train.feed import Feed
from lmwright.train.finite import TooManySkipped
from lmwright.train.hooks import Hook
from lmwright.train.passed import PassedSteps
from lmwright.train.skips import Skips
from tests.resume.small_runs import in_dir, logged, losses
from tests.resume.test_memory import Kill, Killed
from tests.resume.test_skips import Undo, assert_equal, trained


@pytest.fixture(scope="module")
def long_run(small_run):
    """Long enough for the spread of its values to be known."""
    optim = KINDS["adamw"](learning_rate=1e-3, schedule=Constant())
    train = replace(small_run.train, steps=96, skip_spikes="skip", num_microbatches=1)
    policy = Checkpoint(save_every_steps=10, keep_last=20)
    run = replace(small_run, optim=optim, train=train, checkpoint=policy)
    return replace(run, eval=replace(run.eval, every_steps=None))


def exaggerate(monkeypatch, *steps):
    """The gradient of these steps is many times as long: rows weigh much more, others less than
    nothing."""
    batch = Feed.batch

    def exaggerated(feed, step):
        arrays = batch(feed, step)
        if step + 1 in steps:
            factors = np.array([40.0, -39.0, 40.0, -39.0], np.float32)[:, None]
            arrays = arrays | {"loss_weight": arrays["loss_weight"] * factors}
        return arrays

    monkeypatch.setattr(Feed, "batch", exaggerated)


class StopAfter(Hook):
    def __init__(self, step):
        self.step = step

    def after_step(self, session, step):
        if step == self.step:
            session.stop.exit_code = 42


@pytest.mark.slow
def test_a_spike_is_skipped(long_run, tmp_path, monkeypatch):
    quiet, want = trained(long_run, tmp_path / "undone", hooks=[Undo(80)])
    assert not logged(quiet, "skipped")
    exaggerate(monkeypatch, 80)
    run, got = trained(long_run, tmp_path / "run")
    assert_equal(got, want)
    (event,) = logged(run, "skipped")
    assert event["step"] == 80 and np.isfinite(event["loss"]) and event["grad_norm"] > 10
    assert [row["step"] for row in logged(run, "checkpoint")][-3:] == [81, 90, 96]


@pytest.mark.parametrize("made", [RECENT // 2 - 1, RECENT // 2, RECENT])
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_the_bound(made, spread):
    """Median and median distance of the updates that were made, one of them far away."""
    norms = np.exp(spread * np.random.default_rng(made).standard_normal(made)).astype(np.float32)
    norms[3] = 1e6
    recent = {"grad_norm": np.zeros(RECENT, np.float32), "loss": np.zeros(RECENT, np.float32)}
    recent["grad_norm"][:made], recent["loss"][:made] = norms, 2.0
    median = np.sort(norms)[(made - 1) // 2]
    distance = np.sort(np.abs(norms - median))[(made - 1) // 2]
    bound = median + 8 * max(1.4826 * distance, 0.5 * median)  # as docs/faults.md says
    known = made >= RECENT // 2
    for factor, beyond in ((0.999, False), (1.001, True)):
        value = {"loss": np.float32(2.0), "grad_norm": np.float32(bound * factor)}
        assert bool(spike(recent, value)) is (beyond and known)
    for loss, beyond in ((2.159, False), (2.161, True)):  # 1.08 times the median
        value = {"loss": np.float32(loss), "grad_norm": median}
        assert bool(spike(recent, value)) is (beyond and known)


@pytest.mark.slow
def test_too_little_is_known_at_first(long_run, tmp_path, monkeypatch):
    exaggerate(monkeypatch, 40)
    run = replace(long_run, train=replace(long_run.train, steps=42))
    run, got = trained(run, tmp_path / "run")
    assert not logged(run, "skipped")
    assert got["trained"]["model"]["optimizer"]["count"] == 42


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_back_to_the_newest_checkpoint(long_run, tmp_path, monkeypatch, devices):
    rolling = replace(long_run, train=replace(long_run.train, skip_spikes="rollback"))
    # the same run, which is told of the steps
    told = in_dir(rolling, tmp_path / "told")
    trained(rolling, told.dir, devices, [StopAfter(80)])
    (Path(told.dir) / "passed.json").write_text("[[81, 85]]")
    _, want = trained(rolling, told.dir, devices)
    exaggerate(monkeypatch, 84)
    run, got = trained(rolling, tmp_path / "run", devices)
    assert_equal(got, want)
    part = got["trained"]["model"]
    assert (got["step"], part["optimizer"]["count"], part["skipped"]["total"]) == (96, 91, 5)
    (event,) = logged(run, "rollback")
    assert (event["step"], event["checkpoint"]) == (85, 80)
    assert json.loads((Path(run.dir) / "passed.json").read_text()) == [[81, 85]]
    # from a checkpoint before them, and without the record from one after them
    for left, removed in ((70, ()), (90, ("passed.json",))):
        again = in_dir(rolling, tmp_path / f"from {left}")
        shutil.copytree(run.dir, again.dir)
        for name in removed:
            (Path(again.dir) / name).unlink()
        for checkpoint in (Path(again.dir) / "checkpoints").iterdir():
            if int(checkpoint.name) > left:
                shutil.rmtree(checkpoint)
        _, resumed = trained(rolling, again.dir, devices)
        assert_equal(resumed, got)


@pytest.mark.slow
@pytest.mark.parametrize("spike", [84, 90, 94, 95, 96])
def test_sessions_that_end_around_a_spike(long_run, tmp_path, monkeypatch, spike):
    """Wherever sessions end, and how often, the weights are those of one session."""
    exaggerate(monkeypatch, spike)
    policy = replace(long_run.checkpoint, keep_last=1)
    rolling = replace(long_run, checkpoint=policy)
    rolling = replace(rolling, train=replace(long_run.train, skip_spikes="rollback"))
    whole, want = trained(rolling, tmp_path / "whole")
    assert len(logged(whole, "rollback")) == (spike < 95)  # a run that ends with it only skips it
    first, _ = trained(rolling, tmp_path / "first", hooks=[StopAfter(81)])
    stops = [[at] for at in range(spike - 2, min(spike + 4, 96))]
    for ends in (*stops, [spike - 2, spike - 1, spike], [spike - 1, spike + 1]):
        run = in_dir(rolling, tmp_path / "-".join(map(str, ends)))
        shutil.copytree(first.dir, run.dir)
        for at in filter(lambda at: at < 96, ends):
            trained(rolling, run.dir, hooks=[StopAfter(at)])
        _, got = trained(rolling, run.dir)
        assert_equal(got, want)
        steps = [[row["step"], row["checkpoint"]] for row in logged(run, "rollback")]
        assert steps == [[row["step"], row["checkpoint"]] for row in logged(whole, "rollback")]


@pytest.mark.slow
def test_killed_after_a_rollback_behind_what_a_session_saved(long_run, tmp_path, monkeypatch):
    """Its last checkpoint has the effect of steps that are passed over, and is not used."""
    exaggerate(monkeypatch, 84)
    rolling = replace(long_run, train=replace(long_run.train, skip_spikes="rollback"))
    _, want = trained(rolling, tmp_path / "whole")
    run, _ = trained(rolling, tmp_path / "run", hooks=[StopAfter(82)])
    with pytest.raises(Killed):
        trained(rolling, run.dir, hooks=[Kill(86, 0)])
    assert (Path(run.dir) / "checkpoints" / "82").is_dir()
    _, got = trained(rolling, run.dir)
    assert_equal(got, want)
    assert [row["step"] for row in logged(run, "resume")] == [82, 80]


@pytest.mark.slow
def test_rollbacks_that_lead_nowhere(long_run, tmp_path, monkeypatch):
    exaggerate(monkeypatch, *range(84, 96, 2))
    policy = replace(long_run.checkpoint, save_every_steps=80)
    rolling = replace(long_run, checkpoint=policy)
    rolling = replace(rolling, train=replace(long_run.train, skip_spikes="rollback"))
    with pytest.raises(UserError, match=r"up to step 91, after 3 rollbacks .*checkpoints/80"):
        trained(rolling, tmp_path / "run")


def test_only_rollbacks_to_the_same_weights_are_counted(monkeypatch):
    """After three of them a spike ends the run; one to later weights is a first one again."""
    monkeypatch.setattr("lmwright.train.skips.roll_back", lambda *_: 80)
    plan = SimpleNamespace(run=SimpleNamespace(train=SimpleNamespace(skip_spikes="rollback")))
    kept = SimpleNamespace(wait=lambda: None, steps=lambda: [])
    skips = Skips(plan, kept, None, None)
    said = SimpleNamespace(event=lambda *_, **__: None, note=lambda *_: None)

    def back(updates):
        state = {"trained": {"model": {"optimizer": {"count": np.int32(updates)}}}}
        return skips._roll_back(SimpleNamespace(state=state, metrics=said, display=said), 84)

    assert all(back(updates) for updates in (80, 80, 80, 90, 90, 90))
    with pytest.raises(TooManySkipped, match="after 3 rollbacks to the same weights"):
        back(90)


@pytest.mark.slow
def test_switched_on_and_off_between_sessions(long_run, tmp_path):
    modes = [replace(long_run, train=replace(long_run.train, skip_spikes=mode, steps=steps))
             for mode, steps in (("none", 20), ("skip", 30), ("none", 40))]  # fmt: skip
    for run in modes:
        _, state = trained(run, tmp_path / "run")
    _, want = trained(modes[-1], tmp_path / "whole")
    assert_equal(jax.device_get(state), want)


def test_several_adapters_do_not_roll_back(small_run, tmp_path):
    train = replace(small_run.train, skip_spikes="rollback")
    lora = LowRank(adapters=(Adapter(name="a"), Adapter(name="b")))
    with pytest.raises(UserError, match='skip_spikes: "rollback" goes back'):
        resolved(replace(small_run, train=train, lora=lora))


@pytest.mark.slow
def test_states_in_memory_that_are_passed_over(long_run, tmp_path, monkeypatch):
    """They are newer than the checkpoint that the run went back to, and are not used."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    exaggerate(monkeypatch, 84)
    rolling = replace(long_run, train=replace(long_run.train, skip_spikes="rollback"))
    whole, want = trained(rolling, tmp_path / "whole")
    policy = replace(rolling.checkpoint, memory_every_steps=2)
    rolling = replace(rolling, checkpoint=policy)
    with pytest.raises(Killed):
        trained(rolling, tmp_path / "run", hooks=[Kill(85, 0)])
    run, got = trained(rolling, tmp_path / "run")
    assert_equal(got, want)
    assert [row["step"] for row in logged(run, "resume")] == [80]
    unwritten = {85: losses(whole)[85]}
    assert losses(run) | unwritten == losses(whole)  # those of the passed steps stay
    assert logged(run, "rollback")[0]["step"] == 85


def test_where_the_lines_of_a_resumed_run_end(tmp_path):
    """Passed steps are not done again, so their lines stay; one range may follow another."""
    passed = PassedSteps(tmp_path)
    passed.add(81, 85)
    passed.add(86, 90)
    assert [passed.reached(step) for step in (79, 80, 85, 90)] == [79, 90, 90, 90]
    # the state after the last of them has their effect no longer
    assert [passed.within(step) for step in (80, 81, 84, 85, 89, 90)] == [0, 1, 1, 0, 1, 0]
    passed.add(76, 95)
    assert passed.ranges == [[76, 95]]


def test_a_run_does_not_end_among_passed_steps(small_run, tmp_path):
    """Fewer steps than before may lie there; one more than the last of them is the next one."""
    run = replace(small_run, checkpoint=Checkpoint(save_every_steps=4, keep_last=9))
    run = in_dir(replace(run, eval=replace(run.eval, every_steps=None)), tmp_path / "run")
    trained(run, run.dir, hooks=[StopAfter(4)])
    (Path(run.dir) / "passed.json").write_text("[[5, 8]]")
    told = (Path(run.dir) / "metrics.jsonl").read_bytes()
    for steps in (5, 8):
        less = replace(run, train=replace(run.train, steps=steps))
        with pytest.raises(UserError, match=rf"train.steps: {steps} is .* steps 5 to 8,.*set 9 or"):
            trained(less, run.dir)
    assert (Path(run.dir) / "metrics.jsonl").read_bytes() == told
    _, state = trained(replace(run, train=replace(run.train, steps=9)), run.dir)
    part = state["trained"]["model"]
    assert (state["step"], part["optimizer"]["count"], part["skipped"]["total"]) == (9, 5, 4)
