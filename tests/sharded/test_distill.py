"""A student that learns from a teacher over devices, which shard both, has the gradients of one
device, however rows are cut into microbatches."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from lmwright.core.param import init_weights
from lmwright.objectives.distill import TEACHER, Distill
from lmwright.program.qat_section import Qat
from lmwright.program.step import summed_gradients
from tests.sharded.problem import assert_same, fresh_weights, make_batch, make_run, plan_of


def run_of(axes=None, **train):
    """A run with [qat] whose teacher is wider."""
    run = make_run(axes, **train)
    teacher = replace(run.model, embed_dim=32)
    objective = Distill(teacher="there", teacher_model=teacher, alpha=0.7, temperature=1.5)
    return replace(run, objective=objective, qat=Qat(weights="int4", group_size=8))


def gradients(run):
    """Summed gradients and the loss's sums beside the teacher's weights, as numpy arrays."""
    plan = plan_of(run)
    batch = make_batch(run.train.num_microbatches)
    teacher = init_weights(run.objective.teacher_model.spec(), jax.random.key(1))
    where = plan.training.teacher_shardings(plan.mesh)
    with jax.set_mesh(plan.mesh):
        weights = jax.device_put(fresh_weights(run.model), plan.shardings)
        frozen = {TEACHER: jax.device_put(teacher, where)}

        def both(frozen, w, batch):
            keys = [jax.random.key(0)]
            trainees = plan.training.trainees
            grads, (loss,) = summed_gradients(plan, trainees, frozen, {"model": w}, batch, keys)
            return grads["model"], loss

        return jax.tree.map(np.asarray, jax.jit(both)(frozen, weights, batch))


@cache
def alone():
    return gradients(run_of())


@pytest.mark.parametrize(
    "axes, train",
    [
        ({"fsdp": 2, "context": 2, "tensor": 2}, {"num_microbatches": 2}),
        pytest.param({"stage": 2, "data": 4}, {"num_microbatches": 4}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 4}, {"remat": "block"}, marks=pytest.mark.slow),
    ],
)
def test_gradients(axes, train):
    assert_same(gradients(run_of(axes, **train)), alone())
