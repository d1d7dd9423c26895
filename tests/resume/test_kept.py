"""Which checkpoints stay, and which one is taken: small states, without training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.checkpoint.files import LocalRoot
from lmwright.checkpoint.saved import SavedStates
from lmwright.checkpoint.store import Checkpoints
from lmwright.config.run import Checkpoint

STATE = {"w": jnp.arange(4.0)}


def save(folder, policy, steps, **options):
    with Checkpoints(folder, policy, **options) as checkpoints:
        for step in steps:
            state = jax.tree.map(lambda leaf, by=step: leaf + by, STATE)
            checkpoints.save(step, state, {"run": ""})


@pytest.mark.parametrize(
    ("fields", "keep_due", "kept"),
    [
        ({"keep_last": 2}, False, [10, 11]),
        ({"keep_last": 2, "keep_every_steps": 4}, False, [4, 8, 10, 11]),
        ({"keep_last": 1}, True, [10, 11]),  # the last one came at no step at which it was due
    ],
)
def test_the_last_ones_and_those_of_every_so_many_steps_stay(tmp_path, fields, keep_due, kept):
    save(tmp_path, Checkpoint(save_every_steps=2, **fields), (2, 4, 6, 8, 10, 11),
         keep_due=keep_due)  # fmt: skip
    assert SavedStates(tmp_path).steps() == kept


def test_a_run_goes_on_from_none_that_it_went_back_behind(tmp_path):
    policy = Checkpoint(save_every_steps=2, keep_last=9)
    save(tmp_path, policy, (2, 4, 6))
    with Checkpoints(tmp_path, policy, without_effect=lambda step: step > 4) as checkpoints:
        assert checkpoints.newest_due() == 4
        state, meta = checkpoints.restore(STATE)
    assert meta["step"] == 4
    np.testing.assert_array_equal(state["w"], np.arange(4.0) + 4)


def test_a_step_that_is_damaged_again_is_set_aside_again(tmp_path):
    root = LocalRoot(tmp_path)
    for content in ("first", "second"):
        (root.path / "6").mkdir(parents=True)
        (root.path / "6" / "state").write_text(content)
        root.set_aside(6)
        assert root.steps() == [] and root.any_aside()
        assert (tmp_path / "checkpoints.damaged" / "6" / "state").read_text() == content
