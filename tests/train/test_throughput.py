"""Speeds from a clock under control, against sums written out; the peaks against JAX's."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podsmith.presets.hardware import PEAKS, peak_of
from podsmith.train.throughput import Throughput, memory_bytes, peak_flops


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
    speed = Throughput(1000, devices=[FakeDevice("cpu", 1)], clock=clock)
    for waited, worked, paused in spans:
        clock.now += waited + worked
        speed.step_done(input_wait_s=waited)
        clock.now += paused
        speed.pause(paused)
    values = speed.read()
    steps = np.array([w + s for w, s, _ in spans])
    assert values["tokens_per_s"] == pytest.approx(1000 * len(spans) / steps.sum())
    assert values["step_time_p50_s"] == pytest.approx(np.median(steps))
    assert values["step_time_p95_s"] == pytest.approx(np.quantile(steps, 0.95))
    assert values["input_wait_share"] == pytest.approx(sum(w for w, *_ in spans) / steps.sum())
    assert "mfu" not in values and speed.read() == {}


def test_windows_are_separate():
    clock = Clock()
    speed = Throughput(10, devices=[FakeDevice("cpu", 1)], clock=clock)
    for seconds in (2.0, 2.0):
        clock.now += seconds
        speed.step_done(input_wait_s=1.0)
    assert speed.read()["input_wait_share"] == 0.5
    clock.now += 5.0
    speed.step_done()
    second = speed.read()
    assert second["tokens_per_s"] == 2.0 and second["input_wait_share"] == 0.0


def test_mfu_over_all_devices():
    clock = Clock()
    four = [FakeDevice("TPU v4", 5), FakeDevice("TPU v4", 9)] * 2
    speed = Throughput(10, 275e12, devices=four, clock=clock)
    clock.now += 0.5
    speed.step_done()
    values = speed.read()
    assert values["mfu"] == pytest.approx(0.5)  # one device's second of work, in half a second of 4
    assert values["peak_memory_bytes"] == 9


def test_no_peak_no_mfu():
    assert peak_flops([FakeDevice("TPU v4"), FakeDevice("cpu")]) is None
    assert peak_flops(jax.devices()) is None
    assert peak_of("TPU v99") is None


def test_memory_of_this_process_where_devices_do_not_count():
    block = np.ones(50_000_000, np.uint8)  # really touched, so resident
    assert memory_bytes([FakeDevice("cpu")]) > block.nbytes


def test_peaks_agree_with_those_inside_jax():
    """jax keeps a table for its kernels; vendors round, hence 2 %."""
    tpu_info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    try:
        look_up, kinds = tpu_info._get_tpu_info_impl, tpu_info.chip_version_from_device_kind
    except AttributeError:
        pytest.skip("this jax keeps no such table")
    checked = 0
    for kind, peak in PEAKS.items():
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
