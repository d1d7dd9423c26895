"""`lmwright plan --measured`: a run that happened, beside its prediction."""

import json
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax.profiler import ProfileData

from lmwright.cli.main import main
from lmwright.planner import measured, own_machine
from lmwright.planner.compiler.compile import Compiled
from lmwright.report.profile import (
    OTHER_KIND,
    kind_of,
    newest_profile,
    profile_of,
    seconds_by_instruction,
)
from lmwright.report.read import read_run
from lmwright.train.session import train
from tests.resume.small_runs import in_dir


@pytest.fixture(scope="module")
def trained(small_run, tmp_path_factory):
    """A run directory, trained on one CPU device; beside it, the profile that it kept."""
    run = in_dir(small_run, tmp_path_factory.mktemp("measured") / "run")
    kept = replace(run.metrics, profile_steps=(3, run.train.steps))
    # a step of its own: parts are told by places in Python, which other tests' programs do not have
    optim = replace(run.optim, learning_rate=3.1e-3)
    limit = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, limit)
    jax.config.update(limit, 10)
    try:
        train(replace(run, metrics=kept, optim=optim), jax.devices()[:1])
    finally:
        jax.config.update(limit, before)
    Path(run.dir, "profile").rename(Path(run.dir).with_name("profile"))
    env = json.loads(Path(run.dir, "env.json").read_text())
    assert env["device_count"] == 8  # that tests simulate; users have one
    Path(run.dir, "env.json").write_text(json.dumps(env | {"device_count": 1}))
    return Path(run.dir)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def answer(capsys, *words):
    """(exit code, plan.json) of a plan."""
    code = main(["plan", *map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert "error" not in err, err
    return code, json.loads(out)


def rows(trained):
    return [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]


def times(trained):
    """Seconds of each step that was timed."""
    return [row["step_time_p50_s"] for row in rows(trained) if "step_time_p50_s" in row]


def test_what_was_measured_is_beside_what_is_predicted(trained, capsys):
    code, found = answer(capsys, "--measured", trained)
    cores = os.cpu_count()
    assert code == 0 and found["machine"] == f"cpu:{cores}"
    got, said = found["measured"], found["predicted"]
    steps = [row for row in rows(trained) if row["kind"] == "train"]
    assert len(steps) == 12
    # one step a line; the first one timed is slower
    assert got["step_s"] == pytest.approx(statistics.median(times(trained)[1:]))
    compiled = next(row for row in rows(trained) if row["kind"] == "compile")
    assert got["compile_s"] == compiled["seconds"] and not got["by_plan"]
    assert got["memory_bytes"] == max(row["peak_memory_bytes"] for row in steps)
    shares = [row["input_wait_share"] for row in steps if "input_wait_share" in row]
    assert got["input_wait_s"] == pytest.approx(got["step_s"] * statistics.median(shares))
    assert got["save_s"] > 0
    newest = trained / "checkpoints" / "12"
    on_disk = sum(p.stat().st_size for p in newest.rglob("*") if p.is_file())
    assert got["checkpoint_bytes"] == on_disk
    # what plan says of the same run beforehand
    plan = answer(capsys, trained, "--on", f"cpu:{cores}")[1]
    assert said["step_s"] == pytest.approx(plan["step_s"]) and said["by"] == "quick"
    assert said["memory_bytes"] == plan["peak_bytes"]
    assert said["checkpoint_bytes"] == plan["takes"]["checkpoint_bytes"]
    assert found["factor"] == pytest.approx(got["step_s"] / said["step_s"])


def test_the_table(trained, capsys):
    assert main(["plan", "--measured", str(trained), "--on", "cpu:3"]) == 0
    text = capsys.readouterr().out
    assert "small on cpu:3, predicted by the analytic model:" in text
    names = [line[:21].strip() for line in text.splitlines()]
    for name in ("step", "input wait, of it", "compilation", "a save", "checkpoint", "memory"):
        assert name in names, text


@pytest.fixture
def with_profile(trained, tmp_path):
    """A copy of the run directory that kept its profile."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    shutil.copytree(trained.with_name("profile"), copy / "profile")
    return copy


def test_a_profile_is_read_by_part(with_profile, capsys, monkeypatch):
    parts = answer(capsys, "--measured", with_profile)[1]["by_part_s"]
    assert {"attention", "mlp", "norm", "head and loss", "optimizer"} <= set(parts)
    # instructions of one step, on the one or two threads that ran them
    assert 0 < sum(parts.values()) < 2 * max(times(with_profile))
    # most belong to a part; counted, since seconds of so small a step depend on the machine's load
    seconds = measured.seconds_by_instruction
    monkeypatch.setattr(
        measured, "seconds_by_instruction", lambda data: dict.fromkeys(seconds(data), 1.0)
    )
    counts = answer(capsys, "--measured", with_profile)[1]["by_part_s"]
    assert counts.get("other", 0) < 0.5 * sum(counts.values())


def test_a_profile_is_of_the_steps_that_were_asked_for(small_run, tmp_path, capsys):
    run = replace(small_run, metrics=replace(small_run.metrics, profile_steps=(3, 4)))
    train(in_dir(run, tmp_path / "run"), jax.devices()[:1])
    data = ProfileData.from_file(str(newest_profile(tmp_path / "run")))
    stats = (dict(e.stats) for p in data.planes for line in p.lines for e in line.events)
    steps = {s["run_id"] for s in stats if "jit_train_step" in str(s.get("hlo_module"))}
    assert len(steps) == 2
    for steps, cure in (("[4, 3]", "ends before it begins"), ("[1, 9999]", "is behind the last")):
        assert main(["train", f"{tmp_path}/run", f"metrics.profile_steps={steps}"]) == 2
        assert cure in capsys.readouterr().err


def test_a_profile_of_another_machine_is_said(with_profile, capsys):
    env = json.loads((with_profile / "env.json").read_text())
    env |= {"device_kind": "NVIDIA L4", "device_platform": "gpu", "device_count": 1}
    (with_profile / "env.json").write_text(json.dumps(env))
    assert main(["plan", "--measured", str(with_profile)]) == 0
    out = capsys.readouterr().out
    assert "small on gpu:l4x1" in out and "this host cannot compile for" in out


@pytest.fixture
def on_an_h100(trained, tmp_path):
    """A copy of the run directory as a session on an H100 leaves it."""
    copy = tmp_path / "h100"
    shutil.copytree(trained, copy)
    for name, facts in (
        ("env.json", {"device_kind": "NVIDIA H100 80GB HBM3", "device_platform": "gpu"}),
        ("plan.json", {"chosen": {"train.remat": "gate"}}),
    ):
        values = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(values | facts))
    return copy


def compiler_of(peak_bytes, asked):
    """A compiler for CUDA that finds this memory; what it was asked goes to `asked`."""

    def compile_for(run, machine):
        asked.append((run.train.remat, machine.name))
        return Compiled(
            slice=machine.name, mesh={}, num_params=1, tokens_per_step=1, flops_per_step=1.0,
            weights_bytes=1, optimizer_bytes=1, lower_s=1.0, compile_s=61.5, fits=True,
            peak_bytes=peak_bytes, hlo="HloModule step",
        )  # fmt: skip

    return compile_for


def test_a_run_on_a_gpu_is_beside_the_compilers_memory(on_an_h100, capsys, monkeypatch):
    """The step that is compiled is the one that the card chose; its times are arithmetic."""
    asked = []
    monkeypatch.setattr(measured, "compile_for", compiler_of(123 * 2**20, asked))
    monkeypatch.setattr(measured, "has_cuda_compiler", lambda: True)
    plan = answer(capsys, on_an_h100, "--on", "gpu:h100x1", "--quick", "train.remat=gate")[1]
    code, found = answer(capsys, "--measured", on_an_h100)
    assert code == 0 and found["machine"] == "gpu:h100x1"
    said = found["predicted"]
    assert (said["by"], said["memory_by"]) == ("quick", "compiler")
    assert (said["memory_bytes"], said["compile_s"]) == (123 * 2**20, 61.5)
    assert said["step_s"] == pytest.approx(plan["step_s"])
    assert main(["plan", "--measured", str(on_an_h100)]) == 0
    out = capsys.readouterr().out
    assert "predicted by the analytic model, its memory by the compiler for CUDA:" in out
    (row,) = (line for line in out.splitlines() if line.startswith("memory "))
    assert "123.00 MiB" in row
    assert asked == [("gate", "gpu:h100x1")] * 2
    said = answer(capsys, "--measured", on_an_h100, "--quick")[1]["predicted"]
    assert said["memory_by"] == "quick" and said["memory_bytes"] == plan["peak_bytes"]
    answer(capsys, "--measured", on_an_h100, "train.remat=block")
    assert asked[2:] == [("block", "gpu:h100x1")]
    # a factor is one of arithmetic, since that gave the time
    kept = answer(capsys, "--measured", on_an_h100, "--keep")[1]["factor"]
    assert own_machine.factor_of("gpu:h100x1").quick == pytest.approx(kept)
    monkeypatch.setattr(measured, "has_cuda_compiler", lambda: False)
    assert answer(capsys, "--measured", on_an_h100)[1]["predicted"]["memory_by"] == "quick"


def test_the_table_by_part(trained, capsys, monkeypatch):
    monkeypatch.setattr(
        "lmwright.planner.measured.profiled", lambda *_: {"mlp": 0.003, "attention": 0.001}
    )
    assert main(["plan", "--measured", str(trained)]) == 0
    text = capsys.readouterr().out
    assert "by part, of the instructions in its profile (predicted: products alone):" in text
    (row,) = (line for line in text.splitlines() if line.startswith("mlp "))
    assert row.split()[1:3] == ["3", "ms"] and row.endswith(" 75%")


# as a TPU writes it: modules and instructions on lines of their own, a loop around its body
SPACE = """
planes {{
  name: "/device:TPU:{device}"
  event_metadata {{ key: 1 value {{ id: 1 name: "jit_train_step(123)" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "%while.5 = (s32[]) while(%t)" }} }}
  event_metadata {{ key: 3 value {{ id: 3 name: "%fusion.7 = f32[8] fusion(%p)" }} }}
  lines {{ id: 1 name: "XLA Modules" timestamp_ns: 1000
    events {{ metadata_id: 1 offset_ps: 0 duration_ps: 9000000000 }}
    events {{ metadata_id: 1 offset_ps: 10000000000 duration_ps: 9000000000 }} }}
  lines {{ id: 2 name: "XLA Ops" timestamp_ns: 1000
    events {{ metadata_id: 2 offset_ps: 0 duration_ps: 8000000000 }}
    events {{ metadata_id: 3 offset_ps: 1000000000 duration_ps: 3000000000 }}
    events {{ metadata_id: 3 offset_ps: 5000000000 duration_ps: 2000000000 }}
    events {{ metadata_id: 3 offset_ps: 10000000000 duration_ps: 4000000000 }} }}
}}
"""


def test_a_profile_as_a_tpu_writes_it():
    text = "".join(SPACE.format(device=device) for device in (0, 1))
    data = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))
    found = seconds_by_instruction(data)
    # two steps of the first device: 9 ms of the fusion, 8 - 5 ms of the loop itself
    assert found == {"while.5": pytest.approx(0.0015), "fusion.7": pytest.approx(0.0045)}


def test_the_factor_is_kept_used_said_and_removed(trained, capsys):
    plan = (trained, "--on", "cpu:5", "train.steps=100")
    before = answer(capsys, *plan)[1]
    assert before["factor"] is None
    factor = answer(capsys, "--measured", trained, "--on", "cpu:5", "--keep")[1]["factor"]
    after = answer(capsys, *plan)[1]
    assert after["step_s"] == pytest.approx(factor * before["step_s"])
    assert sum(after["by_kind_s"].values()) == pytest.approx(after["step_s"])
    assert after["takes"]["hours"] == pytest.approx(factor * before["takes"]["hours"])
    assert answer(capsys, trained, "--on", "cpu:6")[1]["factor"] is None  # another machine
    assert main(["plan", *map(str, plan)]) == 0
    text = capsys.readouterr().out
    assert f"times {factor:.3g}, as {trained} measured on cpu:5" in text and "--forget" in text
    # measured again, it is the same factor, not one of the corrected prediction
    again = answer(capsys, "--measured", trained, "--on", "cpu:5")[1]["factor"]
    assert again == pytest.approx(factor)
    assert main(["plan", "--measured", str(trained), "--on", "cpu:5", "--forget"]) == 0
    assert "removed" in capsys.readouterr().out
    assert answer(capsys, *plan)[1] == before


def test_a_damaged_file_of_factors_is_no_factor(trained, capsys):
    before = answer(capsys, trained, "--on", "cpu:5")[1]
    own_machine.path().parent.mkdir(parents=True, exist_ok=True)
    for text in ("{", "[]", '{"cpu:5": 3}', '{"cpu:5": {"quick": -1, "run": "a", "date": "b"}}'):
        own_machine.path().write_text(text)
        os.utime(own_machine.path(), ns=(hash(text) % 10**18,) * 2)
        assert answer(capsys, trained, "--on", "cpu:5")[1] == before


@pytest.mark.parametrize(
    "words, says",
    [
        (["nowhere"], "no such folder"),
        (["RUN", "--search"], "--measured: cannot be combined with --search"),
        (["RUN", "--keep", "--forget"], "--keep and --forget"),
        (["RUN", "--on", "h100"], "gpu:h100x8"),
    ],
)
def test_what_cannot_be_compared_is_one_line(trained, capsys, words, says):
    words = [str(trained) if word == "RUN" else word for word in words]
    assert main(["plan", "--measured", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_options_that_need_another(trained, capsys):
    assert main(["plan", str(trained), "--on", "cpu:2", "--keep"]) == 2
    assert "--keep: only works with --measured; add it" in capsys.readouterr().err
    assert main(["plan", str(trained)]) == 2
    assert "--on: missing" in capsys.readouterr().err


def test_the_report_shows_the_profile(with_profile):
    profile = profile_of(read_run(with_profile))
    assert sum(profile.kinds.values()) == pytest.approx(1) and len(profile.operations) == 15
    seconds = seconds_by_instruction(ProfileData.from_file(str(newest_profile(with_profile))))
    whole = sum(seconds.values())
    products = sum(s for name, s in seconds.items() if name.startswith(("dot", "ynn")))
    # summed in another order
    assert profile.kinds["matrix products"] * (1 + 1e-9) >= products / whole > 0.05
    name, _, longest_s, share = profile.operations[0]
    assert longest_s == max(seconds.values()) == seconds[name] and share == longest_s / whole
    assert 0 <= profile.input_wait_share < 1
    assert main(["report", str(with_profile)]) == 0
    page = (with_profile / "report.html").read_text()
    assert "Profile of a step" in page and "time in collectives" in page and name in page
    (newest_profile(with_profile)).write_bytes(b"cut off")
    assert profile_of(read_run(with_profile)) is None


@pytest.mark.parametrize(
    "name, category, kind",
    [
        ("fusion.12", "convolution fusion", "matrix products"),
        ("convolution_add_fusion.3", "", "matrix products"),
        ("all-gather-start.4", "async-start", "collectives"),
        ("reduce-scatter.1", "", "collectives"),
        ("ragged-all-to-all.2", "", "collectives"),
        ("custom-call.7", "custom-call", "attention and other kernels"),
        ("copy.9", "copy", "copies"),
        ("fusion.3", "loop fusion", OTHER_KIND),
        ("reduce.3", "", OTHER_KIND),
    ],
)
def test_kinds_of_instructions(name, category, kind):
    assert kind_of(name, category) == kind
