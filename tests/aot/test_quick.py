"""The analytic model against the compiler, and the search that asks both; minutes each."""

import pytest

from lmwright.cli.main import main
from lmwright.formats.open import load_run
from lmwright.hardware.slices import parse_slice
from lmwright.planner.analytic.machine import machine_of
from lmwright.planner.analytic.quick import MEMORY_ERROR_SHARE, Quick
from lmwright.planner.compiler.compile import compile_for
from lmwright.planner.report import Report
from tests.aot.slices import needs_libtpu, run_of

pytestmark = [pytest.mark.slow, needs_libtpu]


def test_the_arithmetic_is_near_the_compiler(tmp_path):
    run, where = run_of(tmp_path, preset="kisoku-3b", batch=128), parse_slice("v4-32")
    quick, compiled = Quick.of(run, machine_of(where)), compile_for(run, where)
    report = Report(run, where, compiled)
    assert quick.fits == compiled.fits
    assert quick.memory.weights == compiled.weights_bytes
    assert quick.memory.optimizer == compiled.optimizer_bytes
    assert quick.memory.peak == pytest.approx(compiled.peak_bytes, rel=MEMORY_ERROR_SHARE)
    assert quick.step_s == pytest.approx(report.estimate.step_s, rel=0.15)


def test_a_search_ends_with_overrides_that_compile(tmp_path, capsys):
    run_of(tmp_path, preset="llama-135m", batch=64)
    path = tmp_path / "run.toml"
    assert main(["plan", str(path), "--on", "v5e-4", "--search", "--finalists", "1"]) == 0
    out, err = capsys.readouterr()
    assert "compiling 1 of 1" in err and " compiler " in out
    pasted = out.split("to run the best:\n")[1].splitlines()[0].split()
    assert compile_for(load_run(path, pasted), parse_slice("v5e-4")).fits
