"""Two processes skip, roll back and end at the same steps, whichever of them has the fault."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.config.run import Checkpoint, Mesh
from lmwright.optim import KINDS
from lmwright.optim.kinds import Constant
from lmwright.train.session import train
from tests.resume.small_runs import in_dir, logged, losses
from tests.resume.test_hosts import outputs, start_two

pytestmark = pytest.mark.slow

ON_ONE = """
import os
import numpy as np
from lmwright.train.feed import Feed
batch = Feed.batch
def other(feed, step):
    arrays = batch(feed, step)
    if step + 1 in {steps} and os.environ["JAX_PROCESS_ID"] == "1":
        arrays = arrays | {{"loss_weight": arrays["loss_weight"] * np.float32("{factor}")}}
    return arrays
Feed.batch = other
"""
FLIP = """
import jax
from lmwright.train.hooks import HOOKS, Hook
from tests.resume.test_corruption import Flip
class Once(Flip):
    def after_step(self, session, step):
        if jax.process_index() == 1:
            self.device = jax.local_devices()[2].id
        super().after_step(session, step)
HOOKS.append(Once(4, "weights", "embed", device=None))
"""


@pytest.fixture
def shared(small_run):
    """Rows of its own for each process."""
    run = replace(small_run, mesh=Mesh(data=8, fsdp=1))
    return replace(run, train=replace(run.train, global_batch_size=16))


def test_both_skip_what_one_of_them_spoils(shared, tmp_path):
    run = in_dir(shared, tmp_path / "run")
    outputs(start_two(run, ON_ONE.format(steps=(5, 6), factor="nan")), [0, 0])
    assert [row["step"] for row in logged(run, "skipped")] == [5, 6]
    assert logged(run, "train")[-1]["skipped"] == 2
    assert all(np.isfinite(value) for value in list(losses(run).values())[6:])
    assert [row["step"] for row in logged(run, "checkpoint")] == [3, 7, 9, 12]


def test_both_end_after_too_many(shared, tmp_path):
    run = in_dir(shared, tmp_path / "run")
    run = replace(run, train=replace(run.train, max_skipped_steps=3))
    said = outputs(start_two(run, ON_ONE.format(steps=(5, 6, 7, 8), factor="inf")), [46, 46])
    assert all("3 steps in a row were skipped, the last is 7" in text for text in said)


def test_both_roll_back(shared, tmp_path):
    optim = KINDS["adamw"](learning_rate=1e-3, schedule=Constant())
    train_section = replace(shared.train, steps=80, skip_spikes="rollback", num_microbatches=1)
    run = replace(
        shared, optim=optim, train=train_section, checkpoint=Checkpoint(save_every_steps=10)
    )
    run = in_dir(replace(run, eval=replace(run.eval, every_steps=None)), tmp_path / "run")
    outputs(start_two(run, ON_ONE.format(steps=(74,), factor="-3.0")), [0, 0])
    (event,) = logged(run, "rollback")
    assert (event["step"], event["checkpoint"]) == (75, 70)
    assert json.loads((Path(run.dir) / "passed.json").read_text()) == [[71, 75]]
    longer = replace(run, train=replace(train_section, steps=84), mesh=Mesh())
    assert train(longer, jax.devices()[:1]).step == 84


def test_the_host_of_a_flipped_bit_is_named(shared, tmp_path):
    run = in_dir(shared, tmp_path / "run")
    run = replace(run, train=replace(run.train, check_every_steps=5))
    said = outputs(start_two(run, FLIP), [47, 47])
    assert all("has other bits on device" in text and "of host 1 than" in text for text in said)


def test_processes_with_different_runs_do_not_train_together(small_run, tmp_path):
    run = in_dir(small_run, tmp_path / "run")
    other = """
import os
from lmwright.formats import open as opened
load = opened.load_noted
def noted(path, overrides, *left_out):
    mine = [f"seed={os.environ['JAX_PROCESS_ID']}"]
    return load(path, [*overrides, *mine], *left_out)
opened.load_noted = noted
"""
    first, second = outputs(start_two(run, other), [2, 2])
    assert "the run of process 0: not what process 1 has" in first
    assert "the run of process 1: seed is 1 here and 0 on process 0" in second
    assert not Path(run.dir).exists()
