"""Keeping states in the host's memory while training."""

from typing import Any

from lmwright.checkpoint.memory import MemoryTier
from lmwright.config.run import Run
from lmwright.core.finite import not_finite
from lmwright.program.state import saved
from lmwright.train.hooks import Hook, Running


class KeepInMemory(Hook):
    """Keeps the state every `checkpoint.memory_every_steps` steps."""

    def __init__(self, run: Run, tier: MemoryTier):
        self._every, self._tier = run.checkpoint.memory_every_steps, tier

    def after_step(self, session: Running, step: int) -> None:
        if self._every is None or step % self._every:
            return
        state = saved(session.state)
        if not_finite(state):
            return  # the next save says so
        if not self._tier.save(step, state, session.meta()):
            session.display.note(
                "the host's memory is too small to keep states in; going on without"
            )
            self._every = None

    def at_end(self, session: Running, step: int, exit_code: int) -> None:
        if exit_code == 0:
            self._tier.clear()
        else:
            self._tier.wait()


def keeping(run: Run, tier: MemoryTier | None) -> list[Any]:
    """The hook of a run that keeps states in memory."""
    return [KeepInMemory(run, tier)] if tier is not None else []
