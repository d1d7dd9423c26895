"""The rows that plan's step time is held against: their FLOP counts and the runs they become."""

import sys
from pathlib import Path

import pytest

from lmwright.planner.analytic.step_time import error_share
from lmwright.planner.compiler.hlo import parse
from tests.planner.runs import run_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # the benchmark is the source
import plan_accuracy as accuracy

ROWS = accuracy.read_rows()  # refuses rows whose FLOP rate and time disagree


def test_flops_by_hand():
    row = next(r for r in ROWS if r.name.startswith("llama2 70B") and r.calibrates)
    layer = 2 * 8192 * 64 * 128 + 2 * 8192 * 8 * 128 + 3 * 8192 * 28672
    weights = 80 * layer + 8192 * 32000
    scores = 12 * 80 * 4096 * 64 * 128
    assert row.flops_per_chip("params") == pytest.approx(4 * 4096 * 6 * weights)
    assert row.flops_per_chip("full_attention") == pytest.approx(4 * 4096 * (6 * weights + scores))
    assert row.counted_s == pytest.approx(17.373, rel=1e-3)  # as its log says


def test_a_time_that_its_flop_rate_contradicts_is_refused(tmp_path, monkeypatch):
    text = accuracy.ROWS.read_text().replace("step_s = 17.373", "step_s = 15.0")
    (tmp_path / "rows.toml").write_text(text)
    monkeypatch.setattr(accuracy, "ROWS", tmp_path / "rows.toml")
    with pytest.raises(ValueError, match=r"llama2 70B .* disagree"):
        accuracy.read_rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_a_run(row):
    run = row.run()
    chips = row.where.num_chips
    assert run.train.global_batch_size == row.said["rows_per_chip"] * chips
    assert run.model.num_layers == row.compiled_layers
    assert row.where.num_devices % run.mesh.tensor == 0
    assert row.least_s < row.published_s  # no run beats the peak


def test_a_shallow_program_turns_as_often_as_the_deep_one():
    text = """
%body (a: (s32[])) -> (s32[]) {
  %a = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%a), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[]) tuple(%next)
}

%cond (b: (s32[])) -> pred[] {
  %b = (s32[]) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %end = s32[] constant(LIMIT)
  ROOT %lt = pred[] compare(%j, %end), direction=LT
}

ENTRY %main (p: s32[]) -> (s32[]) {
  %p = s32[] parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[]) tuple(%zero)
  ROOT %loop = (s32[]) while(%init), condition=%cond, body=%body
}
"""
    for limit, turns in ((6, 48), (5, 47), (2, 2)):  # whole, one turn peeled off, another loop
        program = parse(text.replace("LIMIT", str(limit)))
        deep = accuracy.Deeper(program.computations, program.entry, shallow=6, real=48)
        main = deep.computations["main"]
        assert deep.trip_count(main.root, main) == turns


def test_the_summary_takes_the_nearest_rank():
    errors = [0.01 * n for n in range(1, 11)]
    assert accuracy.summary("x", errors) == "x: median 5.5%, 90th percentile 9.0%"


def test_the_interval_of_quick_holds_nine_published_runs_of_ten_and_is_no_wider():
    """Of those that nothing is fitted to; calibrating ones are met."""
    inside, errors = [], []
    for row in ROWS:
        quick = accuracy.quick_of(row)
        off = abs(quick.step_s / row.published_s - 1)
        if row.calibrates:
            assert off < 0.01, row.name
            continue
        errors.append(off)
        inside.append(off <= quick.error_share)
    assert len(errors) >= 28
    assert sum(inside) >= 0.9 * len(errors)
    tenth = sorted(errors)[int(0.9 * len(errors))]
    assert tenth > 0.8 * error_share("v4", ROWS[0].run(), compiled=False)
    assert sorted(errors)[len(errors) // 2] < 0.08


def test_what_no_published_run_speaks_for_has_a_wider_interval(tmp_path):
    dense, sparse = (run_of(tmp_path, preset=p) for p in ("llama-1b", "mixtral-8x7b"))
    adapters = run_of(tmp_path, "lora.rank=8", preset="llama-1b")
    for compiled in (True, False):
        usual = error_share("v5e", dense, compiled=compiled)
        assert usual < error_share("v5e", sparse, compiled=compiled)
        assert usual < error_share("v5e", adapters, compiled=compiled)
        assert (
            usual
            < error_share("7x", dense, compiled=compiled)
            < error_share("h100", dense, compiled=compiled)
        )
