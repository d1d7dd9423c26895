"""A device that keeps or computes other bits than its peers is named; healthy ones never are."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.checkpoint.memory import VARIABLE, MemoryTier
from lmwright.config.run import Checkpoint, Mesh
from lmwright.errors import UserError
from lmwright.program.lora_section import LowRank
from lmwright.train import corruption, session
from lmwright.train.hooks import Hook
from tests.resume.small_runs import in_dir, logged


class Flip(Hook):
    """One bit flips in what a device holds of a leaf."""

    def __init__(self, step, part, *path, device=5, bit=3):
        self.step, self.part, self.path = step, part, path
        self.device, self.bit = device, bit

    def after_step(self, session, step):
        if step != self.step:
            return
        *outer, last = self.path
        tree = session.state["trained"]["model"][self.part]
        for name in outer:
            tree = tree[name]
        tree[last] = flipped(tree[last], self.device, self.bit)


def flipped(leaf, device, bit):
    pieces = []
    for shard in leaf.addressable_shards:
        piece = np.array(shard.data)
        if shard.device.id == device:
            flat = piece.reshape(-1).view(np.uint32)
            flat[len(flat) // 2] ^= np.uint32(1 << bit)
        pieces.append(jax.device_put(piece, shard.data.sharding))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)


def checked(run, every, **mesh):
    train = replace(run.train, check_every_steps=every, global_batch_size=16)
    return replace(run, train=train, mesh=Mesh(**{"fsdp": 1} | mesh))


@pytest.mark.parametrize(
    ("flip", "leaf", "device"),
    [
        (Flip(5, "weights", "embed"), "weights/embed", "device 5 of host 0"),
        pytest.param(
            Flip(5, "optimizer", "nu", "layers", "up", device=2, bit=0), "optimizer/nu/layers/up",
            "device 2 of host 0", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_flipped_bit_is_found(small_run, tmp_path, flip, leaf, device):
    run = in_dir(checked(small_run, 6, data=4, fsdp=2), tmp_path / "run")
    run = replace(run, checkpoint=replace(run.checkpoint, save_every_steps=4))
    match = rf"after step 6, trained/model/{leaf} has other bits on {device} than its replicas"
    with pytest.raises(UserError, match=match) as error:
        session.train(run, jax.devices(), hooks=[flip])
    assert error.value.exit_code == 47
    assert [row["step"] for row in logged(run, "checkpoint")] == [4]


def test_a_flipped_bit_of_moments_on_the_host_is_found(small_run, tmp_path):
    run = in_dir(checked(small_run, 2, data=2), tmp_path / "run")
    run = replace(run, optim=replace(run.optim, offload="moments"))
    flip = Flip(3, "optimizer", "nu", "layers", "up", device=1)
    with pytest.raises(UserError, match="trained/model/optimizer/nu/layers/up has other bits"):
        session.train(run, jax.devices()[:2], hooks=[flip])


@pytest.mark.slow
def test_nothing_is_saved_with_it(small_run, tmp_path):
    run = in_dir(checked(small_run, 100, data=8), tmp_path / "run")
    with pytest.raises(UserError, match="after step 6, trained/model/weights/embed has other bits"):
        session.train(run, jax.devices(), hooks=[Flip(5, "weights", "embed")])
    assert [row["step"] for row in logged(run, "checkpoint")] == [3]


def test_nothing_is_kept_in_memory_with_it(small_run, tmp_path, monkeypatch):
    """The run would go on from there when it is started again."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    run = in_dir(checked(small_run, 6, data=2), tmp_path / "run")
    run = replace(run, checkpoint=Checkpoint(save_every_steps=100, memory_every_steps=2))
    with pytest.raises(UserError, match="after step 4, trained/model/weights/embed has other bits"):
        session.train(run, jax.devices()[:2], hooks=[Flip(3, "weights", "embed", device=0)])
    assert MemoryTier(tmp_path / "run").steps() == [2]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "tensor": 2}])
def test_rows_that_a_device_computes_otherwise(small_run, tmp_path, monkeypatch, mesh):
    """Found by their losses alone."""
    monkeypatch.setattr(corruption.Checks, "_check_replicas", lambda *_: None)
    run = in_dir(checked(small_run, 2, **mesh), tmp_path / "run")
    names = "device 5 of host 0" if mesh["data"] == 8 else "device 4 of host 0, device 5 of host 0"
    with pytest.raises(UserError, match=rf"after step 4, losses of the same rows .* on {names}"):
        session.train(run, jax.devices(), hooks=[Flip(3, "weights", "embed", bit=30)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
        ({"data": 2, "fsdp": 2, "context": 2}, {}),
        ({"data": 4, "stage": 2}, {}),
        ({"fsdp": 8}, {"lora": LowRank(rank=2, base="int4")}),
    ],
)
def test_no_alarm_on_any_mesh(run_of_two_layers, tmp_path, mesh, changes):
    run = replace(checked(run_of_two_layers, 1, **mesh), **changes)
    run = in_dir(run, tmp_path / "run")
    assert session.train(run, jax.devices()).exit_code == 0


@pytest.mark.slow
def test_no_alarm_in_a_thousand_steps(small_run, tmp_path):
    run = in_dir(checked(small_run, 1, data=4, fsdp=2), tmp_path / "run")
    policy = replace(run.checkpoint, save_every_steps=500)
    train = replace(run.train, steps=1000, num_microbatches=1, precision="bf16")
    metrics = replace(run.metrics, log_every_steps=100)
    run = replace(run, train=train, checkpoint=policy, metrics=metrics)
    assert session.train(run, jax.devices()).exit_code == 0


def test_the_minority():
    assert corruption.minority([7, 7, 7]) == []
    assert corruption.minority([7, 8, 7]) == [1]
    assert corruption.minority([7, 8]) == [0, 1]
    # of four shards the second computes nines: row 0 on its second turn, row 1 on its first
    prints = np.array([[1, 9, 3, 4], [9, 2, 3, 4], [1, 2, 3, 9]])
    assert corruption.odd_shards(prints, 1) == {1}
