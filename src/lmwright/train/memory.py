"""Keeping states in the host's memory while training."""

from collections.abc import Sequence
from typing import Any

from lmwright.checkpoint.memory import MemoryTier
from lmwright.config.run import Run
from lmwright.core.finite import not_finite
from lmwright.program.state import saved
from lmwright.train.hooks import Hook, Running


class KeepInMemory(Hook):
    """Keeps the state every `checkpoint.memory_every_steps` steps."""

    def __init__(self, run: Run, tier: MemoryTier, checks: Sequence[Hook]):
        """`checks` look for corruption before a state is saved."""
        self._every, self._tier = run.checkpoint.memory_every_steps, tier
        self._checks = checks
        self._done: int | None = None
        """Steps that were done when the last one began."""

    def before_step(self, session: Running, step: int) -> bool:
        """Keeps the state of the step before, which is logged and evaluated by now: a run that goes
        on from there does neither again."""
        before, self._done = self._done, step
        if before in (None, step) or self._every is None or step % self._every:
            return True
        state = saved(session.state)
        if not_finite(state):
            return True  # the next save says so
        for check in self._checks:
            check.before_save(session, step)
        if not self._tier.save(step, state, session.meta()):
            session.display.note(
                "the host's memory is too small to keep states in; going on without"
            )
            self._every = None
        return True

    def at_end(self, session: Running, step: int, exit_code: int) -> None:
        if exit_code == 0:
            self._tier.clear()
        else:
            self._tier.wait()


def keeping(run: Run, tier: MemoryTier | None, checks: Sequence[Hook]) -> list[Any]:
    """The hook of a run that keeps states in memory, which `checks` look at."""
    return [KeepInMemory(run, tier, checks)] if tier is not None else []
