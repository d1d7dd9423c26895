"""Skipped steps, as the host handles them; the step itself decides whether it is skipped.

    step k:   dispatched --> step k - 1 is done --> was it skipped?

The counts come with the other metrics, one step late, so that the devices never wait for the host.
"""

import math

from lmwright.checkpoint.store import Checkpoints
from lmwright.program.plan import Plan
from lmwright.program.state import saved
from lmwright.program.step import IN_A_ROW
from lmwright.program.trainee import Frozen
from lmwright.train.finite import TooManySkipped, divergence_error, refuse_state, skipped
from lmwright.train.hooks import Hook, Running
from lmwright.train.parts import Values
from lmwright.train.passed import PassedSteps
from lmwright.train.rollback import roll_back

CAUSES = {"loss": "loss", "grad_norm": "gradient norm"}
MOST_ROLLBACKS = 3  # to the same weights


class Skips(Hook):
    """Records skipped steps, and raises UserError after too many in a row."""

    def __init__(self, plan: Plan, checkpoints: Checkpoints, frozen: Frozen, passed: PassedSteps):
        self._plan, self._checkpoints = plan, checkpoints
        self._frozen, self._passed = frozen, passed
        self._step = 0
        self._values: Values | None = None
        """The last step, until it was looked at."""
        self._updates, self._rollbacks = -1, 0
        """Of the weights that the run went back to, and how often."""

    def after_step(self, session: Running, step: int) -> None:
        if self._look(session) and step < session.steps and self._roll_back(session, step):
            return  # without effect
        self._step, self._values = step, session.values
        for name, value in session.values.items():
            if name.startswith(IN_A_ROW):
                value.copy_to_host_async()

    def before_save(self, session: Running, step: int) -> None:
        if self._look(session) and step + 1 < session.steps:  # the session ends with it
            self._roll_back(session, step + 1)

    def _look(self, session: Running) -> bool:
        """Looks at the last step; True if it was a spike."""
        values, self._values = self._values or {}, None
        spikes = [
            self._skipped(session, trainee, in_a_row, values)
            for trainee, in_a_row in skipped(values)
        ]
        return any(spikes)

    def _skipped(self, session: Running, trainee: str, in_a_row: int, values: Values) -> bool:
        end = f"/{trainee}" if trainee else ""
        of = f" of adapter {trainee!r}" if trainee else ""
        named = {"adapter": trainee} if trainee else {}
        measured = {name: float(values[name + end]) for name in CAUSES}
        causes = [name for name, value in measured.items() if not math.isfinite(value)]
        if causes:
            cause = f"the {CAUSES[causes[0]]}{of} is {measured[causes[0]]}"
        else:
            cause = f"a spike{of}: loss {measured['loss']:.4g}, gradient norm "
            cause += f"{measured['grad_norm']:.4g}"
        session.metrics.event("skipped", step=self._step, **measured, **named)
        if in_a_row == 1:
            session.display.note(f"step {self._step} is skipped: {cause}")
            refuse_state(self._plan, self._checkpoints, self._step, saved(session.state))
        if in_a_row >= self._plan.run.train.max_skipped_steps:
            what = f"{in_a_row} steps in a row were skipped, the last is {self._step}: {cause}"
            raise divergence_error(self._plan, self._checkpoints, what, TooManySkipped)
        return not causes

    def _roll_back(self, session: Running, step: int) -> bool:
        """Goes back to a checkpoint, so that steps up to `step` are without effect; False where
        there is none."""
        if self._plan.run.train.skip_spikes != "rollback":
            return False
        to = roll_back(session, self._checkpoints, self._frozen, self._passed, step)
        if to is None:
            return False
        (part,) = session.state["trained"].values()
        updates = int(part["optimizer"]["count"])
        self._rollbacks = self._rollbacks + 1 if updates == self._updates else 1
        self._updates = updates
        session.metrics.event("rollback", step=step, checkpoint=to)
        session.display.note(
            f"weights of step {to} again; steps {to + 1} to {step} are passed over"
        )
        if self._rollbacks > MOST_ROLLBACKS:
            what = (
                f"a spike up to step {step}, after {MOST_ROLLBACKS} rollbacks to the same weights"
            )
            raise divergence_error(self._plan, self._checkpoints, what, TooManySkipped)
        return True
