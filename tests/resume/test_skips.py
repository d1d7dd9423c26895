"""A step whose loss or gradient is not finite changes nothing but its count, and the run goes on
as one that skips the same step."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.errors import UserError
from lmwright.optim import KINDS
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.program.state import init_state, saved
from lmwright.program.step import make_step
from lmwright.train import session
from lmwright.train.feed import Feed
from lmwright.train.hooks import Hook
from lmwright.train.signals import EXIT_SKIPPING
from tests.resume.small_runs import STEPS, in_dir, logged
from tests.train.test_step import make_batch, make_run


def poison(monkeypatch, *steps, rows=slice(None), value=np.nan):
    """Targets of some rows weigh NaN in the batches of these steps, which count from 1."""
    batch = Feed.batch

    def poisoned(feed, step):
        arrays = batch(feed, step)
        if step + 1 in steps:
            weights = arrays["loss_weight"].copy()
            weights[rows] = value
            arrays = arrays | {"loss_weight": weights}
        return arrays

    monkeypatch.setattr(Feed, "batch", poisoned)


def trained(run, folder, devices=1, hooks=()):
    """The state at the end of a run, on the host."""
    last = {}

    class Last(Hook):
        def at_end(self, session, step, exit_code):
            last.update(jax.device_get(session.state))

    run = in_dir(run, folder)
    session.train(run, jax.devices()[:devices], hooks=[*hooks, Last()])
    return run, last


class Undo(Hook):
    """Takes back the updates of some steps of an undisturbed run."""

    def __init__(self, *steps):
        self.steps, self.before = steps, None

    def after_step(self, session, step):
        state = session.state
        if step in self.steps:
            part, old = state["trained"]["model"], self.before["trained"]["model"]
            total = old["skipped"]["total"] + 1
            new = old | {"skipped": {"total": total, "in_a_row": np.int32(1)}}
            state["trained"]["model"] = jax.tree.map(
                lambda leaf, value: jax.device_put(value, leaf.sharding), part, new
            )
        self.before = jax.tree.map(np.array, jax.device_get(state))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_equal_to_a_run_that_skips_the_same_step(small_run, tmp_path, monkeypatch, devices):
    if devices > 1:
        small_run = replace(small_run, train=replace(small_run.train, ema_decay=0.9))
    want_run, want = trained(small_run, tmp_path / "undone", devices, [Undo(3, 7)])
    poison(monkeypatch, 3, 7, value=np.nan if devices == 1 else np.inf)
    run, got = trained(small_run, tmp_path / "poisoned", devices)
    assert_equal(got, want)
    part = got["trained"]["model"]
    assert (got["step"], part["optimizer"]["count"]) == (STEPS, STEPS - 2)
    assert part["skipped"] == {"total": 2, "in_a_row": 0}
    for ours, theirs in zip(logged(run, "train"), logged(want_run, "train"), strict=True):
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["loss"] == (theirs["loss"] if ours["step"] not in (3, 7) else "NaN")
        assert ours["skipped"] == (ours["step"] >= 3) + (ours["step"] >= 7)
    assert [row["step"] for row in logged(run, "skipped")] == [3, 7]
    # due after step 3, which was skipped
    assert [row["step"] for row in logged(run, "checkpoint")] == [4, 6, 9, 12]


@pytest.mark.slow
def test_a_run_goes_on_after_a_skipped_step(small_run, tmp_path, monkeypatch):
    """Bit for bit, whether it was stopped between or not."""
    poison(monkeypatch, 4, 5)
    _, whole = trained(small_run, tmp_path / "whole")

    class Stop(Hook):
        def after_step(self, session, step):
            if step == 5:
                session.stop.exit_code = 42

    run, _ = trained(small_run, tmp_path / "parts", hooks=[Stop()])
    assert [row["step"] for row in logged(run, "checkpoint")] == [3, 5]
    _, parts = trained(small_run, tmp_path / "parts")
    assert_equal(parts, whole)


def test_too_many_in_a_row(small_run, tmp_path, monkeypatch, one_device, capsys):
    run = in_dir(small_run, tmp_path / "run")
    train = replace(run.train, max_skipped_steps=4)
    (tmp_path / "run.toml").write_text(dump_toml(replace(run, train=train)))
    poison(monkeypatch, 1, 2, 3, *range(5, STEPS + 1))
    assert main(["train", str(tmp_path / "run.toml")]) == EXIT_SKIPPING == 46
    told = capsys.readouterr().err.strip().splitlines()
    assert told[-1].startswith(
        "lmwright: error: train: 4 steps in a row were skipped, the last is 8: the loss is nan; "
        f"the last finite checkpoint is {run.dir}/checkpoints/4: start another run from it"
    )


@pytest.mark.slow
def test_a_learning_rate_that_is_far_too_high(small_run, tmp_path):
    """Updates that stay finite, and make all losses after them NaN."""
    run = replace(small_run, train=replace(small_run.train, max_skipped_steps=5))
    run = replace(run, optim=KINDS["adamw"](learning_rate=1e30))
    with pytest.raises(UserError, match="5 steps in a row were skipped, the last is 6") as error:
        trained(run, tmp_path / "run")
    assert error.value.exit_code == EXIT_SKIPPING


@pytest.mark.slow
def test_adapters_skip_on_their_own(small_run, tmp_path, monkeypatch):
    adapters = (Adapter(name="sound", rows=2), Adapter(name="ill", rows=2))
    lora = LowRank(adapters=adapters, rank=2, base="fp32")
    run = replace(small_run, lora=lora, train=replace(small_run.train, num_microbatches=1))
    _, want = trained(run, tmp_path / "undisturbed")
    poison(monkeypatch, 5, rows=slice(1, None, 2))
    ours, got = trained(run, tmp_path / "poisoned")
    assert_equal(got["trained"]["sound"], want["trained"]["sound"])
    assert got["trained"]["ill"]["optimizer"]["count"] == STEPS - 1
    assert got["trained"]["ill"]["skipped"] == {"total": 1, "in_a_row": 0}
    (event,) = logged(ours, "skipped")
    assert (event["adapter"], event["step"], event["loss"]) == ("ill", 5, "NaN")
    row = logged(ours, "train")[-1]
    assert (row["skipped"], row["skipped/sound"], row["skipped/ill"]) == (1, 0, 1)


@pytest.mark.parametrize(
    "kind, weight",
    [
        ("adamw", 1e25),  # the loss is finite, the squares of its gradient are not
        *(
            pytest.param(kind, np.inf, marks=pytest.mark.slow)
            for kind in ("adam8bit", "adafactor", "lion", "muon")
        ),
    ],
)
def test_every_optimizer_stays(kind, weight):
    run = replace(make_run(), optim=KINDS[kind](learning_rate=1e-2))
    plan = resolve(run, jax.devices()[:1])
    with jax.set_mesh(plan.mesh):
        step, batch = make_step(plan), make_batch(run)
        state, _ = step(init_state(plan), batch)
        before = jax.tree.map(np.array, jax.device_get(saved(state)))["trained"]["model"]
        batch.loss_weight[0, 1, 3] = weight
        state, values = step(state, batch)
    after = jax.device_get(saved(state))["trained"]["model"]
    assert not np.isfinite(values["grad_norm"])
    assert np.isfinite(values["loss"]) == np.isfinite(weight)
    for part in ("weights", "optimizer"):
        assert_equal(after[part], before[part])
    assert (int(state["step"]), int(after["skipped"]["total"])) == (2, 1)
