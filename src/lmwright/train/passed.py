"""Passed steps: those of a run that are without effect, since it went back to earlier weights.

The record in the run directory, and every checkpoint after them, say which: a run that resumes from
a checkpoint before them passes over the same steps.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lmwright.core.param import Tree
from lmwright.core.processes import from_first
from lmwright.errors import UserError
from lmwright.guard.files import write_whole
from lmwright.program.state import counts_of
from lmwright.train.hooks import Running

RECORD = "passed.json"
MOST_RANGES = 1000


class PassedSteps:
    """The steps of a run that are without effect, as ranges of first and last."""

    def __init__(self, folder: Path):
        self._path = folder / RECORD
        self.ranges = self._read()

    def add(self, first: int, last: int) -> None:
        """Adds a range; those that it covers are dropped."""
        others = [pair for pair in self.ranges if not first <= pair[0] <= pair[1] <= last]
        self.ranges = sorted([*others, [first, last]])

    def write(self) -> None:
        """Writes the record, on process 0."""
        if jax.process_index() == 0:
            write_whole(self._path, json.dumps(self.ranges) + "\n")

    def last(self, step: int) -> int | None:
        """The last step of the range that a step begins; None for a step that is done."""
        return max((last for first, last in self.ranges if first == step), default=None)

    def reached(self, step: int) -> int:
        """The step, or the last of the passed steps that follow it, whose lines stay."""
        while last := self.last(step + 1):
            step = last
        return step

    def within(self, step: int) -> bool:
        """True if a state after this step has the effect of steps that are passed over."""
        return any(first <= step < last for first, last in self.ranges)

    def _read(self) -> list[list[int]]:
        """The record as process 0 has it."""
        pairs = np.zeros((MOST_RANGES, 2), np.int32)
        if jax.process_index() == 0 and self._path.exists():
            try:
                told = json.loads(self._path.read_bytes())
                for number, (first, last) in enumerate(told):
                    pairs[number] = first, last
            except (ValueError, TypeError, IndexError) as error:
                raise UserError(
                    f"{self._path}: is damaged; remove it if the run may take the steps again that "
                    "it lists"
                ) from error
        return [[int(first), int(last)] for first, last in from_first(pairs) if last]


def pass_over(session: Running, last: int) -> None:
    """Moves on to a step without the effect of those before it."""
    for trainee in session.plan.training.trainees:
        count = session.counts[trainee.name]
        session.counts[trainee.name] = max(count, min(count + last - session.at, trainee.steps))
    session.at = last
    session.state = moved_on(session.state, last, session.counts)
    session.display.note(f"steps up to {last} are passed over")


def moved_on(state: Tree, step: int, counts: dict[str, int]) -> Tree:
    """The state at a later step, with `counts` steps done by each trainee."""
    done, trained = counts_of(state), {}
    for name, part in state["trained"].items():
        total = part["skipped"]["total"]
        more = {"total": total + (counts[name] - done[name]), "in_a_row": jnp.zeros_like(total)}
        more = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), more, part["skipped"]
        )
        trained[name] = {**part, "skipped": more}
    at = state["step"]
    return state | {
        "step": jax.device_put(jnp.full_like(at, step), at.sharding),
        "trained": trained,
    }
