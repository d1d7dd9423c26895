"""`lmwright plan --measured`: a run that happened, beside its prediction."""

import json
import os
import statistics
from pathlib import Path

import pytest

from lmwright.cli import main
from lmwright.plan import own_machine

from .conftest import in_dir, train_in_process


@pytest.fixture(scope="module")
def trained(small_run, tmp_path_factory):
    """A run directory, trained on one CPU device in a process of its own."""
    run = in_dir(small_run, tmp_path_factory.mktemp("measured") / "run")
    done = train_in_process(run)
    assert done.returncode == 0, done.stderr[-2000:]
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


def test_what_was_measured_is_beside_what_is_predicted(trained, capsys):
    code, found = answer(capsys, "--measured", trained)
    cores = os.cpu_count()
    assert code == 0 and found["machine"] == f"cpu:{cores}"
    got, said = found["measured"], found["predicted"]
    steps = [row for row in rows(trained) if row["kind"] == "train"]
    assert len(steps) == 12
    times = [row["step_time_p50_s"] for row in steps if "step_time_p50_s" in row]
    # one step a line; the first one timed is slower
    assert got["step_s"] == pytest.approx(statistics.median(times[1:]))
    compiled = next(row for row in rows(trained) if row["kind"] == "compile")
    assert got["compile_s"] == compiled["seconds"] and not got["by_plan"]
    assert got["memory_bytes"] == max(row["peak_memory_bytes"] for row in steps)
    assert 0 <= got["input_wait_s"] < got["step_s"] and got["save_s"] > 0
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
        (["RUN", "--search"], "--measured: does not go together with --search"),
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
    assert "--keep: goes with --measured" in capsys.readouterr().err
    assert main(["plan", str(trained)]) == 2
    assert "--on: missing" in capsys.readouterr().err
