"""A run that the compiler refuses, though the analytic model holds that it fits."""

from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.suggestions import suggest
from tests.aot.slices import run_of

GIB = 2**30


def test_each_suggestion_saves_what_the_compiler_found_too_much(tmp_path):
    lengths = "model.seq_len=32768", "data.pack.seq_len=32768", "train.remat=block", "lora.rank=16"
    run, machine = run_of(tmp_path, *lengths, preset="gemma3-4b", batch=8), parse_machine("v5e-8")
    mine = Quick.of(run, machine)
    assert mine.fits
    found = suggest(run, machine, None, 3.2 * GIB)
    assert found.best is not None and found.best.overrides and not found.best.changes_training
    assert mine.memory.peak - found.best.quick.memory.peak >= 3.2 * GIB
    lines = [line for line in found.lines if "(trains" in line]
    assert lines and all("=" in line.partition("(trains")[0] for line in lines)
    assert "train.offload=block_inputs (trains identically" in lines[0]
