"""StepTimer: the speed of a run, by the clock of the host.

    | waiting |  step  | waiting |  step  |  paused: eval, checkpoint  | waiting | step | ...
    '---- one step ----'---- one step ----'      (no step's time)      '--- one step ---'

The accelerator runs behind the host. A step's time is right on average as long as the loop
is held up each time by a finished step, for example by the one before; p95 is then what the
host saw.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import numpy as np

from lmwright.hardware.devices import peak_of


class StepTimer:
    """Collects step times between two calls of `window`; the first step starts at once.

    `tokens_per_step` counts all hosts. `flops_per_step` (the model's FLOPs of one optimizer
    step, recomputation not counted) and `peak_flops` (of all devices together) give MFU;
    without either it is left out.
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
        self._step_times_s: list[float] = []
        self.waited_s = 0.0  # by the latest step
        self._waited_s = 0.0
        self._paused_s = 0.0
        self._last = clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which time counts as part of the step, and as waiting for input."""
        start = self._clock()
        try:
            yield
        finally:
            self.waited_s = self._clock() - start
            self._waited_s += self.waited_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which time belongs to no step: evaluation, checkpoints, samples."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - start

    def step(self) -> None:
        """Ends a step; the next one starts."""
        now = self._clock()
        self._step_times_s.append(max(now - self._last - self._paused_s, 0.0))
        self._paused_s = 0.0
        self._last = now

    def window(self) -> dict[str, float]:
        """Figures of the steps since the last call, for `MetricsWriter.log`; {} if none.

        tokens_per_s, step_time_p50_s, step_time_p95_s, input_wait_share (of the steps' time,
        0 to 1) and, where the peak is known, mfu (0 to 1).
        """
        times_s = self._step_times_s
        if not times_s:
            return {}
        total_s = max(sum(times_s), 1e-9)  # a clock may be too coarse for one tiny step
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


def peak_flops(devices: Sequence[jax.Device]) -> float | None:
    """Peak bf16 FLOP/s of all devices together; None if one has no known peak."""
    peaks = [peak_of(device.device_kind) for device in devices]
    if any(peak is None for peak in peaks):
        return None
    return sum(peak.bf16_flops for peak in peaks)


def memory_bytes(devices: Sequence[jax.Device]) -> int:
    """Peak memory on one of this process's devices.

    Where a device does not count (CPU): memory of this process now, so that a peak between
    two readings goes unseen.
    """
    here = [device for device in devices if device.process_index == jax.process_index()]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in here]
    counted = [peak for peak in peaks if peak is not None]
    if counted:
        return max(counted)
    import psutil

    return psutil.Process().memory_info().rss
