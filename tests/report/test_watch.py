"""`report --watch` writes the page anew until the run is done or someone presses Ctrl-C."""

import json

import pytest

from lmwright.cli.main import main
from lmwright.report import watch
from tests.report.run_folder import write_run

RELOAD = '<meta http-equiv="refresh"'


@pytest.fixture
def moments(monkeypatch):
    """What happens in the pauses between two pages, in order."""
    left = []
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: left.pop(0)())
    return left


def test_the_page_follows_the_run_until_it_is_done(tmp_path, moments, capsys):
    run = write_run(tmp_path / "run", steps=40)
    page, seen = run / "report.html", []

    def another_line():
        seen.append(page.read_text())
        write_lines(run, step=41)

    def torn_and_damaged():
        seen.append(page.read_text())
        (run / "plan.json").write_text("{")

    def done():
        (run / "plan.json").write_text("{}")
        session = {"began": 1.79e9, "seconds": 80.0, "first_step": 0, "last_step": 41}
        (run / "sessions.json").write_text(json.dumps([session | {"end": "done"}]))

    moments += [another_line, torn_and_damaged, done]
    assert main(["report", str(run), "--watch"]) == 0
    assert "plan.json" in capsys.readouterr().out
    assert all(RELOAD in each for each in seen) and "41 steps" in seen[1]
    assert RELOAD not in page.read_text() and not moments


def test_an_interrupt_leaves_a_page_that_does_not_reload(tmp_path, moments):
    run = write_run(tmp_path / "run")

    def interrupt():
        raise KeyboardInterrupt

    moments.append(interrupt)
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--watch", "-o", str(page)]) == 0
    assert RELOAD not in page.read_text()


def test_it_is_for_the_page_of_curves(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--watch", "--markdown"]) == 2
    assert "leave out --markdown" in capsys.readouterr().err


def write_lines(run, *, step):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "time": 1.8e9, "kind": "train", "loss": 1.0}) + "\n")
