"""Hooks: what is done beside the training, at its moments.

    at_start --> step --> after_step --> log --> after_log --> evaluate --> after_evaluate
        before_step       --> before_save --> save --> after_save ... --> at_end

A hook overrides what it wants, and is given to `train(run, hooks=[...])`.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.evals.source_loss import SourceLoss
from lmwright.program.plan import Plan
from lmwright.program.trainee import Trainee
from lmwright.train.parts import Clock, Display, Metrics, Values
from lmwright.train.signals import StopRequest

HOOKS: list["Hook"] = []
"""Hooks for every run of this process; they run before those of the run."""


class Running(Protocol):
    """The view of a run that hooks have."""

    plan: Plan
    at: int
    """Steps that are done."""
    counts: dict[str, int]
    """Steps that each trainee has done."""
    state: Tree
    """The state of the run (`program.state`); a hook may replace it."""
    values: Values
    """Metrics of the last step, which may not be there yet; those of the step before are."""
    losses: list[SourceLoss]
    """Losses of the last evaluation."""
    batch: Batch
    """Batch of the last step."""
    display: Display
    metrics: Metrics
    stop: StopRequest
    budget: Clock

    @property
    def steps(self) -> int:
        """The step at which the run ends."""

    @property
    def active(self) -> tuple[Trainee, ...]:
        """The trainees that still train."""

    def meta(self) -> dict[str, Any]:
        """Facts that go with a saved state."""

    def paused(self, part: str) -> AbstractContextManager[None]:
        """Context in which time belongs to no step, but to a part such as "save"."""


class Hook:
    """Base of hooks: every method does nothing. `step` counts the steps that are done."""

    def at_start(self, session: Running, step: int) -> None:
        """The first step of the session is about to be compiled."""

    def before_step(self, session: Running, step: int) -> bool | None:
        """The next step is about to read its rows, and may not be compiled yet; False ends the
        session before it. Every hook is asked, once a step."""
        return True

    def after_step(self, session: Running, step: int) -> None:
        """A step was started; its values may not be there yet."""

    def after_log(self, session: Running, step: int, measured: dict[str, float]) -> None:
        """Metrics were written."""

    def after_evaluate(self, session: Running, step: int) -> None:
        """Held-out losses were taken."""

    def before_save(self, session: Running, step: int) -> None:
        """A save is due."""

    def after_save(self, session: Running, step: int) -> None:
        """A save was started; it may not be on disk yet."""

    def at_end(self, session: Running, step: int, exit_code: int) -> None:
        """The session ends, and its last save is on disk; 0 says that the run is done."""
