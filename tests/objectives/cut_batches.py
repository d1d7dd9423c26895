"""A step of an objective of masked tokens, with its batch cut into microbatches and shards."""

from dataclasses import replace

import jax
import pytest

from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step
from tests.train.test_step import SEQ_LEN, make_batch, make_run, model_of

CUTS = [*(pytest.param(*cut, marks=pytest.mark.slow) for cut in ((2, 1), (4, 1))), (1, 4), (2, 4)]
"""Microbatches and devices."""


def after_step(model, objective, microbatches, devices):
    """Weights and metrics after a step, of rows with padding and several documents."""
    run = make_run(num_microbatches=microbatches)
    run = replace(run, model=replace(model, seq_len=SEQ_LEN, vocab_size=64), objective=objective)
    whole = make_batch(replace(run, train=replace(run.train, num_microbatches=1)))
    # as the feed deals rows out
    deal = lambda a: a[0].reshape(-1, microbatches, SEQ_LEN).swapaxes(0, 1)  # noqa: E731
    plan = resolve(run, jax.devices()[:devices])
    with jax.set_mesh(plan.mesh):
        state, metrics = make_step(plan)(init_state(plan), jax.tree.map(deal, whole))
    return model_of(state)["weights"], metrics
