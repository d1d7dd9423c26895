"""`lmwright plan` by arithmetic: exit codes, what is said, what is written."""

import json
import re
from functools import partial

import pytest

from lmwright.cli.main import main
from lmwright.formats.open import load_run
from lmwright.planner import command, compare
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.compiler import compile as aot
from lmwright.planner.units import short_duration
from tests.planner.runs import run_of


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


def test_epochs_of_data_that_is_not_prepared(plan, capsys):
    """The steps are not known, all else is."""
    words = ("--on", "v4-32", "--quick")
    assert plan(*words, "train.epochs=2", "train.steps=none") == 0
    told = capsys.readouterr().out
    assert "hours and cost are those of 1,000 steps" in told and "\n1,000 steps: " in told
    assert plan(*words, "train.steps=1000") == 0
    assert capsys.readouterr().out == told.partition("\n\n")[2]


def test_what_does_not(plan, tmp_path, capsys):
    assert plan("--on", "v5e-8", "--quick") == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT: " in out and "what would make it fit" in out
    assert "predicted" not in out
    # the speed is that of the same run on chips with more memory, but for the memory
    speed = re.search(r"if it did fit, it would take (\S+) s a step, give or take \d+%; ", out)
    run = load_run(tmp_path / "run.toml")
    assert float(speed[1]) == pytest.approx(Quick.of(run, parse_machine("v5e-8")).step_s, rel=0.01)
    last = out.strip().splitlines()[-1]
    found = re.fullmatch(
        r"bound by memory: it needs \S+ times the available memory \(\d+% of that: .+\); to try: "
        r"(.+?) \(trains identically, .*\), which fits, (\S+) s a step by --quick(; close, .*)?",
        last,
    )  # fmt: skip
    better = Quick.of(load_run(tmp_path / "run.toml", found[1].split()), parse_machine("v5e-8"))
    assert better.fits and better.step_s == pytest.approx(float(found[2]), rel=0.01)


def test_the_last_sentence_is_what_bounds_the_run_and_what_quick_gains(plan, tmp_path, capsys):
    assert plan("--on", "v4-32", "--quick", "train.remat=block", "--json") == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["advice"]["bound"] == "arithmetic"
    assert slow["advice"]["share"] == pytest.approx(slow["by_kind_s"]["matmul"] / slow["step_s"])
    words = slow["advice"]["overrides"]
    assert words and plan("--on", "v4-32", "--quick", *words) == 0
    text = capsys.readouterr().out
    assert "no other mesh, remat, number of microbatches or way to add up" in text
    assert plan("--on", "v4-32", "--quick", *words, "--json") == 0
    fast = json.loads(capsys.readouterr().out)
    assert slow["step_s"] / fast["step_s"] == pytest.approx(slow["advice"]["gain"])
    assert plan("--on", "v4-32", "--quick", "train.remat=block") == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert " ".join(words) in last and f"{slow['advice']['gain']:.2f} times as fast" in last
    assert last.endswith(f" a step instead of {short_duration(slow['step_s'])}")


def test_a_price_is_that_of_every_machine(plan, capsys, monkeypatch):
    monkeypatch.setattr(compare, "COMMON", ("v4-32", "v6e-8", "gpu:b200x8", "v5e-1"))
    assert plan("--on", "any", "--price", "1.5", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["machines"]
    fits = [row["takes"] for row in rows if row["fits"]]
    assert len(fits) == 3
    assert all(took["usd"] == pytest.approx(1.5 * took["chip_hours"]) for took in fits)
    assert [took["usd"] for took in fits] == sorted(took["usd"] for took in fits)


def test_data_takes_the_slices(plan, capsys):
    assert plan("--on", "2xv4-32", "--quick", "--json") == 0
    mesh = json.loads(capsys.readouterr().out)["mesh"]
    assert (mesh["data"], mesh["fsdp"]) == (2, 16)


def test_without_the_compiler_the_estimate_is_given(plan, capsys, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    assert plan("--on", "v4-32") == 0
    out = capsys.readouterr().out
    assert "predicted: " in out
    last = out.strip().splitlines()[-1]
    assert "the TPU compiler is not installed" in last and ".[tpu]" in last
    assert plan("--on", "v4-32", "lora.rank=8") == 0
    assert "the TPU compiler is not installed" in capsys.readouterr().out


@pytest.mark.slow  # thousands of candidates; those with --quick are asked above
def test_without_the_compiler_other_layouts_are_estimated(plan, capsys, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    assert plan("--on", "v5e-8") == 1  # as with --quick
    capsys.readouterr()
    assert plan("--on", "v4-32", "--search") == 0
    assert "the TPU compiler is not installed" in capsys.readouterr().out


def test_adapters_that_end_one_after_the_other(plan, capsys):
    """The program that remains is shown, and the whole run takes what its phases take."""
    two = 'lora.adapters=[{name = "a", rank = 8, steps = 200}, {name = "b", rank = 4}]'
    assert plan("--on", "v4-32", "--quick", "--json", two) == 0
    answer = json.loads(capsys.readouterr().out)
    (later,) = answer["later"]
    assert (later["start"], later["stop"], later["trainees"]) == (200, 1000, ["b"])
    assert 0.3 < later["step_s"] / answer["step_s"] < 0.7  # half the rows
    seconds = 200 * answer["step_s"] + 800 * later["step_s"]
    assert answer["takes"]["hours"] == pytest.approx(seconds / 3600)
    assert plan("--on", "v4-32", "--quick", two) == 0
    assert "from step 200, without a: " in capsys.readouterr().out


def test_kaggle_is_a_machine_with_sessions(plan, capsys):
    small = ["model.num_layers=2", "train.global_batch_size=32"]
    assert plan("--on", "kaggle", "--quick", *small) == 0
    out = capsys.readouterr().out
    assert "r on v5e-8" in out and "\n9 hours: " in out and "sessions of 9 hours" in out
    assert plan("--on", "kaggle", "--quick", "--hours", "2", *small) == 0
    assert "a session there ends" not in (told := capsys.readouterr().out) and "\n2 hours" in told
    assert plan("--on", "kaggle", "--quick", *small, "limits.session_hours=12") == 0
    told = capsys.readouterr().out
    assert "9 hours, so that the 12 that are asked for are counted as sessions of 9\n" in told
    assert "\n9 hours: " in told and "\n12 hours" not in told
    assert plan("--on", "kaggle", "--quick", "--hours", "2", *small) == 0
    assert "\n2 hours: " in capsys.readouterr().out


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
LIMITED = (
    "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); "
    "import numpy; numpy.ones(2**28)"
)
ABORTED = (
    "import os, sys; print('terminate called after throwing an instance of std::bad_alloc', "
    "file=sys.stderr, flush=True); os.abort()"
)


@pytest.mark.parametrize("end", [KILLED, LIMITED, ABORTED], ids=["killed", "limited", "aborted"])
def test_too_little_memory_of_this_host_is_not_that_of_the_slice(plan, capsys, monkeypatch, end):
    dies = partial(aot.compile_for, program=("-c", end))
    monkeypatch.setattr(aot, "require_libtpu", lambda: None)
    monkeypatch.setattr(command, "has_libtpu", lambda: True)
    monkeypatch.setattr(command, "compile_for", dies)
    assert plan("--on", "v4-32") == 3
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if "error" in line]
    assert out == "" and len(said) == 1 and "this host ran out of memory" in said[0]
    assert "Traceback" not in err


def test_small_models_have_small_units(plan, capsys):
    run = ["model.preset=llama-5m", "train.global_batch_size=8", "train.steps=500"]
    assert plan("--on", "v5e:1x1", "--quick", *run) == 0
    out = capsys.readouterr().out
    assert " MiB  weights" in out and " ms a step" in out and "0.00 GiB" not in out
    assert "0.000 s" not in out


@pytest.mark.parametrize(
    "on, words",
    [
        ("gpu:h200x8", ["8 GPUs", "assumed, not measured"]),
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
        (["--on", "gpu:h200x8", "--search", "--finalists", "2"], "no candidate is compiled"),
        (["--on", "any", "--search"], "remove --search"),
        (["--on", "2xv4-32", "--quick", "mesh.fsdp=32"], "nearest: mesh.data=2"),
        (["--on", "v5e:3x5", "--quick"], "no TPU v5 lite slice of this shape"),
        (["--on", "h100"], "gpu:h100x8"),
        (["--on", "v4-32", "--quick", "mesh.fsdp=3"], "mesh"),
        (["--on", "v4-32", "--quick", "train.global_batch_size=24"], "multiple of"),
        (["--on", "v4-32", "--quick", "--hours", "-1"], "hours"),
        (
            ["--on", "v4-32", "--quick", "--hours", "inf"],
            "--hours inf: is not 0 or a positive number",
        ),
        (["--on", "v4-32", "--quick", "--out", "/dev/null"], "--out /dev/null: is not a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(plan, capsys, words, says):
    assert plan(*words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err
