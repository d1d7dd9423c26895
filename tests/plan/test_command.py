"""`lmwright plan` by arithmetic: exit codes, what is said, what is written."""

import json

import pytest
from runs import run_of

from lmwright.cli import main


@pytest.fixture
def plan(tmp_path):
    """Runs the verb with words after the run file."""
    run_of(tmp_path)
    return lambda *words: main(["plan", str(tmp_path / "run.toml"), *words])


def test_what_fits(plan, tmp_path, capsys):
    assert plan("--on", "tpu:v4-32", "--quick", "--hours", "1", "--out", str(tmp_path / "o")) == 0
    out = capsys.readouterr().out
    assert "r on v4-32: 16 chips, mesh fsdp 16" in out and "\nFITS: " in out
    assert "by the analytic model; no compiler was asked" in out and "\n1 hours: " in out
    found = json.loads((tmp_path / "o" / "plan.json").read_text())
    assert found["fits"] and found["by"] == "analytic" and found["takes"]["chips"] == 16
    assert sum(found["memory"].values()) == pytest.approx(found["peak_bytes"])
    assert sum(found["by_kind_s"].values()) == pytest.approx(found["step_s"])


def test_what_does_not(plan, capsys):
    assert plan("--on", "v5e-8", "--quick") == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT: " in out and "what would make it fit" in out
    assert "predicted" not in out


@pytest.mark.parametrize(
    "on, words",
    [
        ("gpu:h200x8", ["8 GPUs", "without a kernel", "assumed, not measured"]),
        ("gpu:h100x16", ["16 GPUs in 2 nodes", "network"]),
        ("cpu:8", ["8 cores", "of the host's memory", "no price is known"]),
    ],
)
def test_beyond_tpus_no_compiler_is_needed(plan, capsys, on, words):
    mesh = ["mesh.data=2"] if on == "gpu:h100x16" else []
    assert plan("--on", on, *mesh, "train.num_microbatches=8") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words), out


def test_options_of_the_compiler_are_beyond_the_arithmetic(plan, capsys):
    plan("--on", "v4-32", "--quick", 'train.compiler_options.xla_a="true"')
    assert "train.compiler_options: what they change is not in this answer" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "words, says",
    [
        (["--on", "v5f-8"], "nearest"),
        (["--on", "gpu:h20x8"], "gpu:h200x8"),
        (["--on", "v4-32", "--quick", "--finalists", "2"], "--finalists"),
        (["--on", "v4-32", "--finalists", "2"], "--finalists"),
        (["--on", "gpu:h200x8", "--search", "--finalists", "2"], "no compiler"),
        (["--on", "any", "--search"], "drop --search"),
        (["--on", "any", "--price", "1"], "plan.prices"),
        (["--on", "v4-32", "--quick", "mesh.fsdp=3"], "mesh"),
        (["--on", "v4-32", "--quick", "train.global_batch_size=24"], "multiple of"),
        (["--on", "v4-32", "--quick", "--hours", "-1"], "hours"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(plan, capsys, words, says):
    assert plan(*words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err
