"""The parts that the loop is handed, as it sees them; `train.session` makes them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax

from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.evals.source_loss import SourceLoss
from lmwright.program.trainee import Trainee

Values = dict[str, jax.Array]
"""Metrics of a step, which may not be there yet."""


class Step(Protocol):
    """The compiled step for some trainees, and the rows that they read."""

    names: tuple[str, ...]
    """Names of the trainees."""

    @property
    def by_plan(self) -> bool:
        """True if `plan` had compiled it."""

    @property
    def reason(self) -> str:
        """Reason why it was compiled although `plan` had; empty where it had not."""

    def __call__(self, state: Tree, k: int) -> tuple[Batch, Tree, Values]:
        """Batch `k`, and the state and the values of the step that reads it."""

    def late(self, k: int) -> bool:
        """True if batch `k` is not there, nor comes in a moment."""

    @property
    def waited_s(self) -> float:
        """Seconds that the latest step waited for its rows."""

    def measured(self) -> dict[str, float]:
        """Speed and memory since the last call, under their names in metrics.jsonl."""

    def paused(self) -> AbstractContextManager[None]:
        """Context in which time belongs to no step."""

    def finish(self) -> None:
        """Raises UserError for data that is found to be altered at the end of a run."""

    def close(self) -> None:
        """Ends the threads that read rows."""


Compile = Callable[[Tree, Sequence[Trainee], Mapping[str, int], int], Step]
"""`compile(state, active, counts, at)`: the step for `active` trainees, which have done `counts`
steps each; it reads the rows after step `at` of the run."""


class Evaluator(Protocol):
    """Held-out losses and samples."""

    def evaluate(
        self, step: int, state: Tree, name: str, stops: Callable[[], bool]
    ) -> list[SourceLoss] | None:
        """Losses of the model with one trainee on its held-out data, which are printed and written
        down after a step, as are its samples; None where it broke off, as `stops` told it to before
        a batch."""


class Checkpoints(Protocol):
    """The saved states of the run."""

    root: Any
    """Folder that holds them by step."""

    def steps(self) -> list[int]:
        """Steps that have an intact state, ascending."""

    def newest(self) -> int | None:
        """The newest of them."""

    def lost(self) -> bool:
        """True if the last save failed in a way that another save may not."""

    def save(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Starts saving a state with facts that go with it."""

    def wait(self) -> None:
        """Waits until what was started is on disk."""


class Clock(Protocol):
    """The machine time of the session, and what is left of it."""

    def apart(self, part: str) -> AbstractContextManager[None]:
        """Context in which time belongs to no step, but to a part such as "save"."""

    def stepped(self, step: int, waited_s: float = 0.0) -> None:
        """Records that a step is done, and how long it waited for its rows."""

    def saved(self, seconds: float) -> None:
        """Records the total seconds of a save."""

    def over(self, beside_s: float = 0.0) -> int | None:
        """Exit code if there is no time left for one more step, `beside_s` seconds that go with it,
        and a save; otherwise None."""

    def close(self, end: str) -> None:
        """Records how the session ended."""


class Metrics(Protocol):
    """Writes metrics.jsonl."""

    def log(self, step: int, **values: float) -> None:
        """Metrics of a step."""

    def event(self, kind: str, *, step: int, **fields: Any) -> None:
        """Something that happened after a step."""


class Display(Protocol):
    """The progress that a person sees."""

    def update(self, step: int, **values: float) -> None:
        """Shows a step as done."""

    def saved(self, step: int) -> None:
        """Shows the step of the newest checkpoint."""

    def note(self, text: str) -> None:
        """Prints a line."""


class Profiler(Protocol):
    """Profiles some of the steps."""

    def before(self, step: int, state: object) -> None:
        """Called before each step with the state that it takes; the first of a run is 1."""

    def after(self, step: int, values: object) -> None:
        """Called with what the step gave."""
