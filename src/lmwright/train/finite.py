"""End of a run whose numbers are no longer finite, without saving its state.

An update can overflow where loss and gradient were finite, so the state is asked itself. That is
one pass over it on the devices, before a save, which waits for the step anyway.
"""

import math
from collections.abc import Mapping

import jax

from lmwright.checkpoint.store import Checkpoints
from lmwright.core.finite import not_finite
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.program.plan import Plan

WORDS = {"loss": "loss", "grad_norm": "gradient norm"}


def refuse_values(
    plan: Plan, checkpoints: Checkpoints, step: int, values: Mapping[str, float | jax.Array]
) -> None:
    """Raises UserError unless loss and gradient norm of a step, also those of each adapter
    (`loss/NAME`), are finite."""
    for name in sorted(values, key=lambda name: "/" not in name):  # adapters first: they are named
        word, _, adapter = name.partition("/")
        if word in WORDS and not math.isfinite(value := float(values[name])):
            of = f" of adapter {adapter!r}" if adapter else ""
            raise divergence_error(
                plan, checkpoints, f"the {WORDS[word]}{of} of step {step} is {value}"
            )


def refuse_state(plan: Plan, checkpoints: Checkpoints, step: int, state: Tree) -> None:
    """Raises UserError unless weights, averages and optimizer moments after a step are finite."""
    if bad := not_finite(state):
        raise divergence_error(
            plan, checkpoints, f"{bad} holds NaN or infinities after step {step}"
        )


def divergence_error(plan: Plan, checkpoints: Checkpoints, what: str) -> UserError:
    """Error that ends such a run; it names the newest checkpoint, which was checked to be finite
    when it was saved or restored."""
    checkpoints.wait()
    steps = checkpoints.steps()
    rate = "a lower optim.learning_rate or optim.clip_norm"
    if not steps:
        return UserError(
            f"train: {what}, and nothing was saved before; train in another dir= with {rate}"
        )
    prefix = f"train: {what}; the last finite checkpoint is {checkpoints.root / str(steps[-1])}: "
    if not plan.training.freezes:
        cure = f"start another run from it, with train.init_from, another dir= and {rate}"
    elif len(plan.training.trainees) > 1:
        cure = (
            "the other adapters go on from it if you leave that one out of lora.adapters, or give "
            "it a new name and a lower learning rate"
        )
    else:
        cure = f"train again in another dir= with {rate}"
    return UserError(prefix + cure)
