"""Profile of some steps in `RUN/profile`, which TensorBoard and `lmwright plan --measured` read."""

from pathlib import Path

import jax


class Profiler:
    """Profiles the steps from `first` to `last`, on process 0; a context manager that ends a
    profile that is open."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        self._folder, self._running = folder / "profile", False
        self._first, self._last = steps or (0, 0)
        self._wanted = steps is not None and jax.process_index() == 0

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int, state: object) -> None:
        """Called before each step with the state that it takes; the first of a run is 1."""
        if self._wanted and not self._running and self._first <= step <= self._last:
            jax.block_until_ready(state)  # so that the step before is no part of it
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # millions of calls, none of an instruction
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._running = True

    def after(self, step: int, values: object) -> None:
        """Called with what the step gave, which is waited for after the last."""
        if self._running and step >= self._last:
            jax.block_until_ready(values)
            self._stop()
            self._wanted = False

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
