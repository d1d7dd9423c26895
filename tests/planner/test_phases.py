"""Runs of adapters that end at different steps take what their phases take, in every answer."""

import json

import pytest

from lmwright.cli.main import main
from lmwright.planner import compare
from tests.planner.runs import run_of

ROWS, LENGTH = 64, 2048


@pytest.fixture
def plan(tmp_path, capsys, monkeypatch):
    """The answer for two adapters of these steps, each with half of the rows; any machine is one of
    these three."""
    monkeypatch.setattr(compare, "COMMON", ("v4-32", "v4-128", "gpu:h100x8"))
    run_of(tmp_path)

    def ask(first, second, *words, code=0):
        adapters = f'[{{name = "a", steps = {first}}}, {{name = "b", steps = {second}}}]'
        given = [f"lora.adapters={adapters}", "lora.rank=8", f"train.global_batch_size={ROWS}"]
        assert main(["plan", str(tmp_path / "run.toml"), "--quick", *given, *words]) == code
        said = capsys.readouterr()
        return json.loads(said.out) if "--json" in words else said.err or said.out

    return ask


@pytest.mark.parametrize("first, second", [(1000, 400), (3000, 1000), (200, 100), (300, 300)])
def test_tokens_hours_and_checkpoints_are_those_of_the_phases(first, second, plan):
    """Whatever train.steps says, which is that of adapters without steps of their own."""
    answer = plan(first, second, "--on", "v4-32", "--json")
    takes, later = answer["takes"], answer.get("later", [])
    assert takes["steps"] == first
    assert takes["tokens"] == (second * ROWS + (first - second) * ROWS // 2) * LENGTH
    seconds = second * answer["step_s"] + sum(
        (part["stop"] - part["start"]) * part["step_s"] for part in later
    )
    assert takes["hours"] == pytest.approx(seconds / 3600)
    every = takes["checkpoints_written"] / first
    assert every == pytest.approx(1 / 500, abs=1 / first)


def test_other_answers_reckon_with_the_phases_too(plan):
    hours = plan(3000, 1000, "--on", "v4-32", "--json", "mesh.fsdp=16")["takes"]["hours"]
    told = plan(3000, 1000, "--on", "any", "--json")["machines"]
    (choice,) = [each for each in told if each["machine"] == "v4-32"]
    assert choice["takes"]["steps"] == 3000
    assert 0.5 * hours < choice["takes"]["hours"] <= 1.01 * hours


def test_rows_that_are_left_and_cannot_be_divided_are_named(plan):
    said = plan(1000, 400, "--on", "v4-128", code=2)
    assert "lora.adapters: from step 400 on, without b, 32 rows a step are left" in said
    assert "change the steps or the rows of the adapters" in said
    told = plan(1000, 400, "--on", "any", "--json")["machines"]
    assert not next(each for each in told if each["machine"] == "v4-128")["fits"]


def test_a_search_reckons_with_the_optimizer_of_its_best(tmp_path, capsys):
    """What it prints is what a plan of the overrides that it names prints."""
    run_of(tmp_path, batch=16)
    words = ["plan", str(tmp_path / "run.toml"), "--on", "v5e-4", "--quick"]
    assert main([*words, "--search"]) == 0
    told = capsys.readouterr().out
    best = told.partition("to run the best:\n")[2].splitlines()[0].split()
    assert "optim.kind=adam8bit" in best
    assert main([*words, *best]) == 0
    again = capsys.readouterr().out.splitlines()
    (line,) = [line for line in told.splitlines() if line.startswith("checkpoints: ")]
    assert line in again
