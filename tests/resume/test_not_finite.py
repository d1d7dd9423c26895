"""States with NaN or infinities are neither saved nor used, and no such run ends well."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.checkpoint.store import Checkpoints
from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.core.finite import not_finite
from lmwright.errors import UserError
from lmwright.formats.weights import load_run_weights
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.program.state import init_state, saved
from lmwright.train import hooks, session
from lmwright.train.hooks import Hook
from tests.resume.small_runs import STEPS, in_dir, logged


def checkpoints_of(run):
    return sorted(int(p.name) for p in (Path(run.dir) / "checkpoints").iterdir())


def spoil(monkeypatch, part, step, value=np.nan):
    """One number of a part of the state goes bad in the update of a step."""

    class Spoil(Hook):
        def after_step(self, session, done):
            if done != step:
                return
            model = session.state["trained"]["model"]
            leaves, tree = jax.tree.flatten(model[part])
            i = next(i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32 and leaf.ndim)
            leaves[i] = jax.device_put(leaves[i].at[(0,) * leaves[i].ndim].set(value),
                                       leaves[i].sharding)  # fmt: skip
            model[part] = jax.tree.unflatten(tree, leaves)

    monkeypatch.setattr(hooks, "HOOKS", [Spoil()])
    monkeypatch.setattr(session, "HOOKS", hooks.HOOKS)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_that_goes_bad_keeps_its_good_checkpoints(small_run, tmp_path, monkeypatch, devices):
    run = in_dir(small_run, tmp_path / "run")
    run = replace(run, metrics=replace(run.metrics, log_every_steps=1000))
    spoil(monkeypatch, "weights", step=8)
    with pytest.raises(UserError, match=r"step 9; the last finite .*/run/.*/6: start") as error:
        session.train(run, jax.devices()[:devices])
    assert "trained/model/weights/embed holds NaN" in str(error.value)
    assert checkpoints_of(run) == [3, 6]
    assert not_finite(load_run_weights(run.dir)[1]) is None
    # the cure that the message names
    again = replace(run.train, init_from=f"{run.dir}/checkpoints/6", steps=2)
    monkeypatch.undo()
    assert (
        session.train(replace(run, dir=f"{run.dir}-2", train=again), jax.devices()[:1]).exit_code
        == 0
    )


@pytest.mark.parametrize("part", ["optimizer", "ema"])
def test_what_loss_and_gradient_do_not_show(small_run, tmp_path, monkeypatch, part):
    train = replace(small_run.train, ema_decay=0.9)
    run = replace(in_dir(small_run, tmp_path / "run"), train=train)
    spoil(monkeypatch, part, step=6, value=np.inf)
    with pytest.raises(UserError, match=rf"(?s){part}.*infinities after step 6.*checkpoints/3"):
        session.train(run, jax.devices()[:1])
    assert checkpoints_of(run) == [3]


def test_the_last_update_overflows(small_run, tmp_path, capsys):
    """Loss and gradient norm of the only step are finite; its update is not."""
    run = in_dir(small_run, tmp_path / "run")
    optim = replace(run.optim, learning_rate=1e39)
    train = replace(run.train, steps=1, global_batch_size=16)
    (tmp_path / "run.toml").write_text(dump_toml(replace(run, optim=optim, train=train)))
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "after step 1, and nothing was saved before; train in another dir=" in said
    assert checkpoints_of(run) == []


def test_an_earlier_run_saved_nan(trained_run, tmp_path, capsys):
    """It goes on from the newest finite state, and readers take that one, too."""
    run = in_dir(trained_run, tmp_path / "run")
    shutil.copytree(trained_run.dir, run.dir)
    expected = load_run_weights(run.dir)[1]
    bad = init_state(resolve(run, jax.devices()[:1]))
    model = bad["trained"]["model"]
    model["weights"] = jax.tree.map(lambda leaf: leaf * jnp.nan, model["weights"])
    keep = replace(run.checkpoint, keep_last=9)
    with Checkpoints(Path(run.dir), keep) as checkpoints:
        checkpoints.save(STEPS + 1, saved(bad), {"run": ""})
    got = load_run_weights(run.dir)[1]
    assert "checkpoint 13 is not finite: trained/model/weights/" in capsys.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    with pytest.raises(
        UserError, match=r"checkpoints/13: is not finite: trained/model/weights/.*choose another"
    ):
        load_run_weights(run.dir, 13)
    more = replace(run, train=replace(run.train, steps=STEPS + 2))
    assert session.train(more, jax.devices()[:1]).step == STEPS + 2
    said = " ".join(capsys.readouterr().out.split())
    assert "checkpoint 13 is not finite" in said and f"continuing from step {STEPS}" in said


def test_one_of_several_adapters_goes_bad(small_run, tmp_path):
    run = in_dir(small_run, tmp_path / "run")
    adapters = (Adapter(name="good", rows=2), Adapter(name="wild", rows=2, learning_rate=1e30))
    train = replace(run.train, num_microbatches=1, max_skipped_steps=5)
    run = replace(run, train=train, lora=LowRank(adapters=adapters, rank=2, base="fp32"))
    run = replace(run, metrics=replace(run.metrics, log_every_steps=1000))
    with pytest.raises(UserError, match=r"(?s)(adapter 'wild'|/wild/).* nothing was saved before"):
        session.train(run, jax.devices()[:1])
    assert logged(run, "skipped")[0]["adapter"] == "wild"


def test_every_leaf_of_a_sharded_tree_is_asked():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {"step": jnp.int32(3), "a": {"b": jax.device_put(jnp.ones(16), sharding)}}
    assert not_finite(tree) is None
    for place, value in ((0, np.nan), (15, np.inf), (7, -np.inf)):
        bad = jax.device_put(jnp.ones(16).at[place].set(value), sharding)
        assert not_finite(tree | {"c": bad}) == "c"
