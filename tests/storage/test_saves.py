"""Saves into a bucket that fail, and are tried again."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from lmwright.checkpoint.store import Checkpoints, _Save
from lmwright.config.run import Checkpoint
from lmwright.errors import StorageError
from lmwright.storage.mirror import Mirror, mirror_folder
from tests.storage.fake_gcs import Faults


@pytest.fixture
def state():
    return {"step": jnp.int32(3), "w": jnp.arange(12.0).reshape(3, 4)}


@pytest.fixture
def told():
    return []


@pytest.fixture
def checkpoints(url, told, monkeypatch):
    monkeypatch.setattr("tests.storage.fake_gcs.STATUSES", ("400",))  # which no client repeats
    pauses = []
    monkeypatch.setattr("lmwright.checkpoint.store.time.sleep", pauses.append)
    folder = mirror_folder(url)
    Mirror(url, folder).begin()
    with Checkpoints(folder, Checkpoint(), warn=told.append) as checkpoints:
        yield checkpoints


def saved(checkpoints, state):
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return checkpoints.restore(shapes)[0]


def test_a_save_that_fails_behind_is_done_again(checkpoints, state, proxy, told):
    checkpoints.save(1, state, {})
    checkpoints.wait()
    proxy.faults = Faults(1.0, kinds=("400",), only="/upload/", most=1)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    assert sum(proxy.faults.counts.values()) == 1 and told == []
    assert checkpoints.steps() == [1, 3]
    np.testing.assert_array_equal(saved(checkpoints, state)["w"], state["w"])
    checkpoints.save(5, state, {})
    checkpoints.wait()
    assert checkpoints.steps() == [3, 5] and not checkpoints.files.unfinished()


def test_a_state_whose_memory_is_taken_is_done_without(checkpoints, state, told):
    checkpoints.save(1, state, {})
    checkpoints.wait()
    other = jax.tree.map(jnp.copy, state)
    other["w"].delete()  # as the step after does
    checkpoints._last = _Save(3, other, {}, time.monotonic())
    checkpoints._save_again(OSError("cut short"))
    assert checkpoints.steps() == [1]
    assert len(told) == 1 and told[0] == "checkpoint 3 was not kept: cut short"
    checkpoints.save(4, state, {})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 4]


def test_a_save_that_cannot_begin_is_done_again(checkpoints, state, monkeypatch):
    save, failures = ocp.CheckpointManager.save, [OSError("cut short")] * 2

    def fail(self, *words, **options):
        if failures:
            raise failures.pop()
        return save(self, *words, **options)

    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    assert checkpoints.steps() == [3]


def test_a_bucket_that_never_takes_it_is_told(checkpoints, state, proxy):
    checkpoints.save(1, state, {})
    checkpoints.wait()
    proxy.faults = Faults(1.0, kinds=("400",), only="/upload/")
    with pytest.raises(StorageError, match="could not be written"):
        checkpoints.save(3, state, {})
        checkpoints.wait()
    proxy.faults = Faults()
    assert checkpoints.steps() == [1]  # the last good one is there
    vars(checkpoints).pop("_manager")  # which would tell it again
