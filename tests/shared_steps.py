"""One compiled train step for all runs of a process whose steps are the same program.

Training makes its step anew in each session, as its process trains once; tests train hundreds of
times, mostly one and the same small model.
"""

import sys
from dataclasses import replace
from functools import wraps

KEPT = 16  # steps; the oldest goes
APART = {"name": "", "dir": "", "checkpoint": None, "metrics": None, "limits": None, "eval": None}
"""Fields of a run that no step reads."""


def share_steps():
    """Lets `train` take the step that it made before of the same plan."""
    compiled = sys.modules.get("lmwright.train.compiled")
    if compiled is not None and not hasattr(compiled.make_step, "steps"):
        compiled.make_step = remembering(compiled.make_step)


def remembering(make_step):
    """`make_step` that makes each step once."""
    steps = {}

    @wraps(make_step)
    def shared(plan, active=None):
        key = program_of(plan, active)
        if key not in steps:
            if len(steps) == KEPT:
                del steps[next(iter(steps))]
            steps[key] = make_step(plan, active)
        return steps[key]

    shared.steps = steps
    return shared


def program_of(plan, active=None):
    """A text that is the same for plans of the same programs."""
    train = replace(plan.run.train, init_from=None, max_skipped_steps=20)
    run = replace(plan.run, **APART, data=None, train=train)
    names = [one.name for one in active or plan.training.trainees]
    return repr((run, plan.compute, plan.seq_len, plan.mesh.shape, plan.devices, names))
