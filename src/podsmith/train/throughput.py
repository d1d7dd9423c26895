"""StepTimer: how fast a run is, from the host's clock.

    | waiting |  step  | waiting |  step  |  paused: eval, checkpoint  | waiting | step | ...
    '---- one step ----'---- one step ----'    (in no step's time)     '---- one step --'

The accelerator runs behind the host. A step's time is right on average as long as the loop
itself is held up now and then by a finished step, for example by reading the loss of the
step before; p95 is then what the host saw.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from podsmith.presets.hardware import peak_of


class StepTimer:
    """Collects step times between two calls of `window()`.

    `tokens_per_step` counts all hosts. `flops_per_step` (model FLOPs of one optimizer step,
    recomputation not counted) and `peak_flops` (of all devices together) give MFU; without
    either it is left out.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._tokens_per_step = tokens_per_step
        self._flops_per_step = flops_per_step
        self._peak_flops = peak_flops
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forgets the window; the next step starts now (call it after the first compile)."""
        self._step_times_s: list[float] = []
        self._waited_s = 0.0
        self._paused_s = 0.0
        self._last = self._clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside is part of the step, and counted as waiting for input."""
        start = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside belongs to no step: evaluation, checkpoints, samples."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - start

    def step(self) -> None:
        """Ends a step; the next one starts."""
        now = self._clock()
        self._step_times_s.append(now - self._last - self._paused_s)
        self._paused_s = 0.0
        self._last = now

    def window(self) -> dict[str, float]:
        """Figures of the steps since the last call, for `MetricsWriter.log`; {} if none.

        tokens_per_s, step_time_p50_s, step_time_p95_s, input_wait_share (of the steps' time)
        and, where the peak is known, mfu. Shares are between 0 and 1.
        """
        times_s = self._step_times_s
        if not times_s:
            return {}
        total_s = max(sum(times_s), 1e-9)
        p50_s, p95_s = np.percentile(times_s, [50, 95])
        values = {
            "tokens_per_s": self._tokens_per_step * len(times_s) / total_s,
            "step_time_p50_s": float(p50_s),
            "step_time_p95_s": float(p95_s),
            "input_wait_share": min(self._waited_s / total_s, 1.0),
        }
        if self._flops_per_step and self._peak_flops:
            values["mfu"] = self._flops_per_step * len(times_s) / total_s / self._peak_flops
        self._step_times_s = []
        self._waited_s = 0.0
        return values


def peak_flops_of_devices() -> float | None:
    """Peak bf16 FLOP/s of all devices of all hosts together; None if one has no known peak."""
    import jax

    peaks = [peak_of(device.device_kind) for device in jax.devices()]
    if any(peak is None for peak in peaks):
        return None
    return sum(peak.bf16_flops for peak in peaks)


class PeakMemory:
    """Most memory seen in use: of the fullest local device, else of this process."""

    def __init__(self) -> None:
        self._peak_bytes = 0

    def sample(self) -> int:
        """Bytes at the peak so far.

        A device keeps its own peak. Where it does not (CPU), resident memory of the process
        is sampled, and peaks between two calls go unseen.
        """
        import jax

        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        used = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
        if not used:
            import psutil

            used = [psutil.Process().memory_info().rss]
        self._peak_bytes = max(self._peak_bytes, *used)
        return self._peak_bytes
