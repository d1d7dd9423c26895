"""End of a run whose numbers are no longer finite, without saving its state.

A step whose loss or gradient is not finite is skipped; the run ends after too many in a row. An
update can overflow where both were finite, so the state itself is checked before a save, which
waits for the step anyway, and when the first step is skipped: one pass over it on the devices.
"""

from collections.abc import Iterator

from lmwright.core.finite import not_finite
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.program.plan import Plan
from lmwright.program.step import IN_A_ROW
from lmwright.train.parts import Checkpoints, Values
from lmwright.train.signals import EXIT_SKIPPING


class TooManySkipped(UserError):
    """No step of many in a row gave an update."""

    exit_code = EXIT_SKIPPING


def skipped(values: Values) -> Iterator[tuple[str, int]]:
    """The trainees, by name where there are several, for which a step was skipped, and how often
    this was so in a row."""
    counts = {name: value for name, value in values.items() if name.startswith(IN_A_ROW)}
    for name, value in counts.items():
        if (name != IN_A_ROW or len(counts) == 1) and (in_a_row := int(value)):
            yield name.partition("/")[2], in_a_row


def refuse_state(plan: Plan, checkpoints: Checkpoints, step: int, state: Tree) -> None:
    """Raises UserError unless weights, averages and optimizer moments after a step are finite."""
    if bad := not_finite(state):
        raise divergence_error(
            plan, checkpoints, f"{bad} holds NaN or infinities after step {step}"
        )


def divergence_error(
    plan: Plan, checkpoints: Checkpoints, what: str, kind: type[UserError] = UserError
) -> UserError:
    """Error that ends such a run; it names the newest checkpoint, which was checked to be finite
    when it was saved or restored."""
    checkpoints.wait()
    steps = checkpoints.steps()
    rate = "a lower optim.learning_rate or optim.clip_norm"
    if not steps:
        return kind(
            f"train: {what}, and nothing was saved before; train in another dir= with {rate}"
        )
    prefix = f"train: {what}; the last finite checkpoint is {checkpoints.root / str(steps[-1])}: "
    if not plan.training.freezes:
        cure = f"start another run from it, with train.init_from, another dir= and {rate}"
    elif len(plan.training.trainees) > 1:
        cure = (
            "the other adapters continue from it if you leave that one out of lora.adapters, or "
            "give it a new name and a lower learning rate"
        )
    else:
        cure = f"train again in another dir= with {rate}"
    return kind(prefix + cure)
