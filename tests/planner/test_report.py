"""What plan says: parts that add up, bounds by arithmetic, cures that fit the cause."""

import errno
import json

import pytest

from lmwright.formats.open import load_run
from lmwright.hardware.slices import parse_slice
from lmwright.planner import report as reports
from lmwright.planner.analytic.machine import machine_of
from lmwright.planner.compiler.compile import Compiled
from lmwright.planner.cost import cost_of
from lmwright.planner.report import Report, write_plan

GIB = 2**30

PROGRAM = """
ENTRY %main (p: f32[4096]) -> f32[4096] {
  %p = f32[4096]{0} parameter(0)
  ROOT %sum = f32[4096]{0} all-reduce(%p), replica_groups=[1,16]<=[16]
}
"""

RUN = """
name = "r"
dir = "runs/r"
recipe = "pretrain"
[model]
preset = "kisoku-3b"
[data]
dir = "data"
sources = [{path = "text"}]
[train]
steps = 1000
global_batch_size = 128
"""


def report_of(tmp_path, *overrides, **answer):
    (tmp_path / "run.toml").write_text(RUN)
    known = {
        "slice": "v4-32", "mesh": {"fsdp": 16, "tensor": 1}, "num_params": 3_325_627_392,
        "tokens_per_step": 262_144, "flops_per_step": 4.4e15, "weights_bytes": GIB,
        "optimizer_bytes": 2 * GIB, "lower_s": 1.0, "compile_s": 40.0, "fits": True,
        "peak_bytes": 13 * GIB,
    }  # fmt: skip
    run = load_run(tmp_path / "run.toml", overrides)
    return Report(run, parse_slice("v4-32"), Compiled(**(known | answer)))


def test_parts_add_up_and_the_bound_is_peak_arithmetic(tmp_path):
    report = report_of(tmp_path)
    assert sum(report.parts.values()) == 13 * GIB
    # 16 chips of 275 TFLOP/s
    assert report.least_step_s == pytest.approx(1.0)
    text = "\n".join(report.lines())
    assert "FITS: 13.00 of 30.75 GiB" in text
    assert "predicted" not in text  # nothing was compiled
    plan = json.loads(write_plan(report.to_json(), tmp_path / "out").read_text())
    assert plan["tokens"] == 262_144_000 and plan["chips"] == 16 and "hlo" not in plan


def test_a_full_disk_leaves_no_folder_behind(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(reports, "write_output", full)
    (tmp_path / "mine").mkdir()
    for name in ("out", "mine"):
        with pytest.raises(OSError, match="No space"):
            write_plan("{}", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_does_not_fit_says_by_how_much(tmp_path):
    answer = {"fits": False, "peak_bytes": 45 * GIB, "limit_bytes": 30 * GIB}
    text = "\n".join(report_of(tmp_path, **answer).lines())
    assert "DOES NOT FIT: 45.00 of 30.00 GiB, 15.00 GiB too much" in text


def test_an_estimate_and_what_it_takes_are_in_plan_json(tmp_path):
    report = report_of(tmp_path, hlo=PROGRAM)
    cost = cost_of(report.run, machine_of(report.where), 3600.0, 262_144, price=2.0, hours=9)
    plan = json.loads(report.to_json(cost))
    assert sum(plan["peak"].values()) == plan["peak_bytes"]
    assert list(plan["peak"])[2:] == ["gradients", "saved activations", "temporaries"]
    assert plan["estimate"]["collectives"] == {"all-reduce": 1}
    analytic = json.loads(report.quick.to_json(cost))  # `plan --quick` has the same names
    assert (plan["by"], analytic["by"]) == ("compiler", "analytic")
    for name in ("limit_bytes", "memory_by", "step_s", "remat", "mesh", "fits"):
        assert type(plan[name]) is type(analytic[name]), name
    assert set(plan["estimate"]["by_kind"]) == {"exposed collectives"}
    assert plan["takes"]["chip_hours"] == 16_000 and plan["takes"]["usd"] == 32_000
    text = "\n".join(report.lines(cost))
    assert "predicted: " in text and "9 hours: 8 of 1,000 steps" in text
