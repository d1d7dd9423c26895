"""What is read from a run directory, and what is said when it is damaged."""

import json
import math

import pytest

from lmwright.errors import UserError
from lmwright.report.read import flatten, read_run
from tests.report.run_folder import write_run


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_curves_are_those_of_the_file(tmp_path):
    folder = write_run(tmp_path / "a")
    record = read_run(folder)
    lines = [line for line in lines_of(folder) if line["kind"] == "train"]
    assert record.train["loss"].steps == [line["step"] for line in lines]
    assert record.train["loss"].values == [line["loss"] for line in lines]
    assert list(record.evals) == ["wiki", "code"]
    last = [e for e in lines_of(folder) if e["kind"] == "eval" and e["source"] == "code"][-1]
    assert record.evals["code"]["bits_per_byte"].values[-1] == last["bits_per_byte"]
    assert [s.step for s in record.samples] == [20, 40, 60]
    assert record.resumes == [30] and record.config["model.embed_dim"] == 96


def test_hours_leave_out_the_time_between_stop_and_resume(tmp_path):
    record = read_run(write_run(tmp_path / "a", seconds_per_step=36.0, stopped_s=1e6))
    assert record.hours.values[-1] == pytest.approx(60 * 36 / 3600 - 36 / 3600)


def test_hours_of_a_step_take_in_its_evaluation(tmp_path):
    """Also of the last step, whose lines are the last of the file."""
    folder = write_run(tmp_path / "a")
    last = lines_of(folder)[-1]["time"]
    with open(folder / "metrics.jsonl", "a") as file:
        for after_s, kind in ((36, "train"), (3600, "eval"), (5400, "checkpoint")):
            line = {"step": 61, "time": last + after_s, "kind": kind, "loss": 1.0}
            file.write(json.dumps(line | {"source": "wiki"} if kind == "eval" else line) + "\n")
    hours = read_run(folder).hours
    assert hours.steps[-2:] == [60, 61]
    assert hours.values[-1] - hours.values[-2] == pytest.approx(1.5)


def test_line_being_written_is_not_read(tmp_path):
    folder = write_run(tmp_path / "a")
    whole = read_run(folder).train
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 70, "time": 1.8e9, "ki')
    assert read_run(folder).train == whole


def test_values_json_cannot_hold(tmp_path):
    folder = write_run(tmp_path / "a")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 61, "time": 1.8e9, "kind": "train", "loss": "NaN"}\n')
        file.write('{"step": 62, "time": 1.8e9, "kind": "train", "loss": "-Infinity"}\n')
    nan, inf = read_run(folder).train["loss"].values[-2:]
    assert math.isnan(nan) and inf == -math.inf


def test_step_measured_again_counts_new(tmp_path):
    folder = write_run(tmp_path / "a")
    again = {"step": 60, "time": 1.8e9, "kind": "eval", "source": "wiki", "loss": 0.125}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(again) + "\n")
    curve = read_run(folder).evals["wiki"]["loss"]
    assert curve.steps == [20, 40, 60] and curve.values[-1] == 0.125


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{torn", "line 3: damaged"),
        ("", "line 3: damaged"),
        ('["list"]', "line 3: damaged"),
        ('{"step": 1, "kind": "train"}', "line 3: damaged"),
        ('{"step": 1, "time": 1, "kind": "train", "loss": "high"}', "line 3: not a 'train' line"),
        ('{"step": 1, "time": 1, "kind": "eval", "loss": 1}', r"line 3: .*\(no 'source'\)"),
        ('{"step": 1, "time": 1, "kind": "eval", "source": "a"}', r"line 3: .*\(no 'loss'\)"),
        (
            '{"step": 1, "time": 1, "kind": "eval", "source": "a", "loss": 1, "rows": 2}',
            "line 3: .*rows and of_rows belong together",
        ),
        (
            '{"step": 1, "time": 1, "kind": "gradient error", "error": "high", "setting": "fp8"}',
            "line 3: .*'high' is not a number",
        ),
        ('{"step": 1, "time": 1, "kind": "train", "loss": 1}', "line 3: .*step 1 comes after"),
    ],
)
def test_damage_is_named_by_file_and_line(tmp_path, line, problem):
    folder = write_run(tmp_path / "a")
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:1], lines[2], line, *lines[3:]]) + "\n")
    with pytest.raises(UserError, match=rf"metrics\.jsonl, {problem}"):
        read_run(folder)


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read_run(tmp_path / "absent")
    (tmp_path / "my.toml").write_text('dir = "runs/a"')
    with pytest.raises(UserError, match=r"is a run file; give the directory \(runs/a\) in which"):
        read_run(tmp_path / "my.toml")
    (tmp_path / "note").touch()
    with pytest.raises(UserError, match="note: is a file; give the directory of a run"):
        read_run(tmp_path / "note")
    folder = write_run(tmp_path / "a")
    (folder / "plan.json").unlink()
    (folder / "env.json").unlink()
    assert read_run(folder).plan == read_run(folder).env == {}
    (folder / "metrics.jsonl").write_text('{"step": 1, "t')
    with pytest.raises(UserError, match="holds no measurement but a torn line"):
        read_run(folder)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl: missing"):
        read_run(folder)
    (folder / "run.toml").unlink()
    with pytest.raises(UserError, match="is not a run directory"):
        read_run(folder)


@pytest.mark.parametrize("name", ["plan.json", "env.json", "run.toml"])
def test_damaged_other_files(tmp_path, name):
    folder = write_run(tmp_path / "a")
    (folder / name).write_text('{"a": ')
    with pytest.raises(UserError, match=rf"{name}: cannot be read"):
        read_run(folder)


def test_flatten():
    tree = {"a": {"b": 1, "c": []}, "s": [{"p": "x"}, {"p": "y"}], "t": [1, 2]}
    assert flatten(tree) == {"a.b": 1, "a.c": [], "s.0.p": "x", "s.1.p": "y", "t": [1, 2]}
