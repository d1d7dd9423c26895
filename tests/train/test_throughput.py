"""Speeds from a clock under control, against sums written out; the peaks against JAX's."""

from importlib.util import find_spec

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmwright.hardware.chips import CHIPS
from lmwright.hardware.devices import GPUS, peak_of
from lmwright.train.throughput import StepTimer, memory_bytes, peak_flops


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class FakeDevice:
    process_index = 0

    def __init__(self, kind, peak_bytes=None):
        self.device_kind = kind
        self.peak_bytes = peak_bytes

    def memory_stats(self):
        return None if self.peak_bytes is None else {"peak_bytes_in_use": self.peak_bytes}


durations = st.floats(1e-3, 50.0)


@given(st.lists(st.tuples(durations, durations, durations), min_size=1, max_size=30))
def test_pauses_are_in_no_step(spans):
    """Each step waits w, works s, and is followed by a pause p that is nobody's time."""
    clock = Clock()
    timer = StepTimer(1000, clock=clock)
    for waited, worked, paused in spans:
        with timer.waiting():
            clock.now += waited
        clock.now += worked
        timer.step()
        with timer.paused():
            clock.now += paused
    values = timer.window()
    steps = np.array([w + s for w, s, _ in spans])
    assert values["tokens_per_s"] == pytest.approx(1000 * len(spans) / steps.sum())
    assert values["step_time_p50_s"] == pytest.approx(np.median(steps))
    assert values["step_time_p95_s"] == pytest.approx(np.quantile(steps, 0.95))
    assert values["input_wait_share"] == pytest.approx(sum(w for w, *_ in spans) / steps.sum())
    assert "mfu" not in values and timer.window() == {}


def test_windows_are_separate():
    clock = Clock()
    timer = StepTimer(10, clock=clock)
    for _ in range(2):
        with timer.waiting():
            clock.now += 1.0
        clock.now += 1.0
        timer.step()
    assert timer.window()["input_wait_share"] == 0.5
    clock.now += 5.0
    timer.step()
    second = timer.window()
    assert second["tokens_per_s"] == 2.0 and second["input_wait_share"] == 0.0


def test_an_interrupted_wait_is_counted():
    clock = Clock()
    timer = StepTimer(10, clock=clock)
    with pytest.raises(KeyboardInterrupt), timer.paused():
        clock.now += 7.0
        raise KeyboardInterrupt
    clock.now += 2.0
    timer.step()
    assert timer.window()["step_time_p50_s"] == 2.0


def test_mfu_over_all_devices():
    clock = Clock()
    four = [FakeDevice("TPU v4", 5), FakeDevice("TPU v4", 9)] * 2
    timer = StepTimer(10, 275e12, peak_flops(four), clock=clock)
    clock.now += 0.5
    timer.step()
    # One device's work of a second, done in half a second by four.
    assert timer.window()["mfu"] == pytest.approx(0.5)
    assert memory_bytes(four) == 9


def test_no_peak_no_mfu():
    assert peak_flops([FakeDevice("TPU v4"), FakeDevice("cpu")]) is None
    assert peak_flops(jax.devices()) is None
    assert peak_of("TPU v99") is None


def test_memory_of_this_process_where_devices_do_not_count():
    block = np.ones(50_000_000, np.uint8)  # really touched, so resident
    assert memory_bytes([FakeDevice("cpu")]) > block.nbytes


def test_peaks_agree_with_those_inside_jax():
    """jax keeps a table for its kernels; vendors round, hence 2 %."""
    since_11, before = "jax._src.tpu_info", "jax._src.pallas.mosaic.tpu_info"
    tpu_info = pytest.importorskip(since_11 if find_spec(since_11) else before)
    try:
        look_up, kinds = tpu_info._get_tpu_info_impl, tpu_info.chip_version_from_device_kind
    except AttributeError:
        pytest.skip("this jax keeps no such table")
    checked = 0
    peaks = {kind: chip.peak for chip in CHIPS.values() for kind in chip.device_kinds}
    peaks |= {gpu.device_kind: gpu.peak for gpu in GPUS.values()}
    for kind, peak in peaks.items():
        # jax has 140 TFLOP/s for a v3 chip; its maker and 4 MXUs at 940 MHz say 123.
        if kind == "TPU v3" or (version := kinds(kind)) is None:
            continue
        # One core in a device, except where two are joined.
        cores = 2 if kind in ("TPU v4", "TPU v5", "TPU v5p") else 1
        info = look_up(version, cores)
        per_device = info.bf16_ops_per_second * cores
        hbm_bytes = info.hbm_capacity_bytes * cores
        assert peak.bf16_flops == pytest.approx(per_device, rel=0.02), kind
        assert peak.hbm_bytes == pytest.approx(hbm_bytes, rel=0.1), kind
        checked += 1
    assert checked >= 8
