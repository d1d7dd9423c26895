"""Rollback: after a spike a run goes on with the weights of its newest checkpoint and new batches.

    checkpoint c ... c + 1 .. k: without effect ... k + 1 with the weights of c

The run's step never goes back, so batch and schedule stay functions of it. Which steps are without
effect is recorded in the run directory, and in every checkpoint after them: a run that resumes from
one before them passes over the same steps.
"""

import jax

from lmwright.checkpoint.store import Checkpoints
from lmwright.formats.train_state import restore
from lmwright.program.state import saved
from lmwright.program.trainee import Frozen
from lmwright.train.hooks import Running
from lmwright.train.passed import PassedSteps, moved_on


def roll_back(
    session: Running, checkpoints: Checkpoints, frozen: Frozen, passed: PassedSteps
) -> int | None:
    """Puts the newest checkpoint's weights and optimizer in place of those after the steps since,
    which are then without effect; its step, or None where there is no checkpoint."""
    checkpoints.wait()
    steps = checkpoints.steps()
    if not steps:
        return None
    passed.add(steps[-1] + 1, session.at)
    passed.write()
    jax.tree.map(lambda leaf: leaf.delete(), saved(session.state))  # devices cannot hold two states
    restored = restore(session.plan, checkpoints, frozen, steps[-1])
    assert restored is not None
    session.state = moved_on(restored[0], session.at, session.counts)
    return steps[-1]
