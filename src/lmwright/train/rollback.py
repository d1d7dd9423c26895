"""Rollback: after a spike a run goes on with the weights of an earlier checkpoint and new batches.

    checkpoint c ... c + 1 .. k: without effect ... k + 1 with the weights of c

The checkpoint is the newest of a step at which a save was due. What a session saved at its end does
not count, so that the weights do not depend on where sessions end. A session that ends right after
a spike, a step before the rollback, goes back itself, and the next one passes over that step.

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
    session: Running, checkpoints: Checkpoints, frozen: Frozen, passed: PassedSteps, last: int
) -> int | None:
    """Puts a checkpoint's weights and optimizer in place of those after the steps since. These and
    others up to `last` are then without effect. The checkpoint's step, or None where there is
    none."""
    checkpoints.wait()
    step = checkpoints.newest_due()
    if step is None:
        return None
    passed.add(step + 1, session.at)
    if last > session.at:
        passed.add(session.at + 1, last)
    passed.write()
    jax.tree.map(lambda leaf: leaf.delete(), saved(session.state))  # devices cannot hold two states
    restored = restore(session.plan, checkpoints, frozen, step)
    assert restored is not None
    session.state = moved_on(restored[0], session.at, session.counts)
    return step
