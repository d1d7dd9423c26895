"""`lmwright plan` for GPUs: the compiler's memory where it is installed, and what is said else."""

import json
from itertools import pairwise

import pytest

from lmwright.cli.main import main
from lmwright.hardware.devices import GPUS
from lmwright.planner import command
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.compiler import compile as aot
from lmwright.planner.compiler import gpu
from tests.planner.runs import run_of

GIB = 2**30


@pytest.fixture
def plan(tmp_path):
    """Runs the verb with words after the run file."""
    run_of(tmp_path)
    return lambda *words: main(["plan", str(tmp_path / "run.toml"), *words])


def compiled_with(peak_bytes, monkeypatch):
    """Has the compiler answer with this memory."""

    def answer(run, machine):
        assert machine.name == "gpu:h100x8"
        return aot.Compiled(
            slice=machine.name, mesh={}, num_params=1, tokens_per_step=1, flops_per_step=1.0,
            weights_bytes=1, optimizer_bytes=1, lower_s=1.0, compile_s=61.4,
            fits=peak_bytes <= machine.usable_bytes, peak_bytes=peak_bytes,
        )  # fmt: skip

    monkeypatch.setattr(command, "has_cuda_compiler", lambda: True)
    monkeypatch.setattr(command, "compile_for", answer)


def test_the_verdict_is_the_compilers(plan, capsys, monkeypatch):
    compiled_with(50 * GIB, monkeypatch)
    assert plan("--on", "gpu:h100x8") == 0
    out = capsys.readouterr().out
    assert "FITS: 50.00 of 60.00 GiB, by the compiler for CUDA\n" in out
    assert "activations and temporaries" in out and "give or take 20%" not in out
    assert "compiled in 61 s; the times are those of the analytic model" in out
    assert "no compiler was asked" not in out
    assert plan("--on", "gpu:h100x8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["peak_bytes"], found["compile_s"]) == (50 * GIB, 61.4) and found["fits"]
    assert found["memory_by"] == "compiler" and sum(found["memory"].values()) == 50 * GIB


def test_what_does_not_fit_by_the_compiler(plan, capsys, monkeypatch):
    """Arithmetic says that it fits; what is suggested saves what is too much."""
    assert plan("--on", "gpu:h100x8", "--quick") == 0
    capsys.readouterr()
    compiled_with(61 * GIB, monkeypatch)
    assert plan("--on", "gpu:h100x8") == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT: 61.00 of 60.00 GiB, by the compiler for CUDA: 1.00 GiB too much" in out
    assert "it needs 1.02 times the available memory" in out
    assert "what would make it fit" in out and "; to try: " in out


def test_without_the_compiler_memory_is_estimated(plan, capsys, monkeypatch):
    monkeypatch.setattr(command, "has_cuda_compiler", lambda: False)
    assert plan("--on", "gpu:h100x8") == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("the CUDA compiler is not installed, so this is the memory of --quick")
    assert "[cuda13]" in last and last.endswith("(no GPU is needed)")


@pytest.mark.parametrize("name", GPUS)
def test_a_card_is_described(name):
    """Each field once; memory and bandwidth are those of the plan."""
    lines = gpu.description(GPUS[name]).split()
    fields = dict(pairwise(lines))
    assert fields["memory_bandwidth:"] == str(int(GPUS[name].hbm_bytes_per_s))
    assert fields["device_memory_size:"] == str(GPUS[name].peak.hbm_bytes)
    assert parse_machine(f"gpu:{name}x1").kind == name
    assert lines.count("core_count:") == lines.count("cuda_compute_capability") == 1
