"""metrics.jsonl gone or damaged before a resume: training continues and says in one sentence what
it found, and the verbs that read the run work afterwards."""

import shutil
from pathlib import Path

import pytest

from lmwright.cli.main import main
from tests.resume.small_runs import STEPS, in_dir, losses

pytestmark = pytest.mark.usefixtures("one_device")
SAVED = STEPS - 3  # the step that training goes on from
JUNK = bytes(range(256)) * 3


def lines_of(path):
    return path.read_bytes().splitlines(True)


def gone(path):
    path.unlink()


def emptied(path):
    path.write_bytes(b"")


def cut_in_a_line(path):
    """Ends in the middle of the line of step 5."""
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b'{"step": 5,') + 30])


def torn_inside(path):
    """The line of step 5 lost its end, and what follows is whole."""
    data = path.read_bytes()
    at = data.index(b'{"step": 5,')
    path.write_bytes(data[: at + 30] + data[data.index(b"\n", at) :])


def junk_inside(path):
    lines = lines_of(path)
    path.write_bytes(b"".join([*lines[:4], JUNK, b"\n", *lines[4:]]))


def all_junk(path):
    path.write_bytes(JUNK * 50)


def zeros_at_the_end(path):
    """As a file system leaves it after a power cut."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\0" * (len(data) // 2))


def valid_json_of_another_kind(path):
    """Lines that are JSON with a step, and nothing that a report could read."""
    lines = lines_of(path)
    odd = b'{"step": 2}\n{"step": 2, "time": 1.7e9, "kind": "train", "loss": []}\n'
    path.write_bytes(b"".join([*lines[:3], odd, *lines[3:]]))


CASES = {
    gone: f"is missing, so the measurements up to step {SAVED} are lost",
    emptied: f"is empty, so the measurements up to step {SAVED} are lost",
    cut_in_a_line: "ends at step 4, so the measurements after step 4 are lost",
    torn_inside: "line 7 is damaged",
    junk_inside: "line 5 and 3 more are damaged",
    all_junk: f"now in metrics.jsonl.damaged, and the measurements up to step {SAVED} are lost",
    zeros_at_the_end: "so the measurements after step 6 are lost",
    valid_json_of_another_kind: "line 4 and 1 more are damaged",
}


@pytest.fixture
def stopped(trained_run, tmp_path):
    """A run directory whose newest checkpoint is three steps before the end."""
    folder = Path(shutil.copytree(trained_run.dir, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    return folder


@pytest.mark.parametrize("damage", CASES, ids=lambda damage: damage.__name__)
def test_training_continues_and_the_run_can_be_read(damage, stopped, trained_run, capsys):
    path = stopped / "metrics.jsonl"
    damage(path)
    assert main(["train", str(stopped)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "metrics.jsonl" in line]
    assert len(said) == 1 and CASES[damage] in said[0], said
    assert main(["report", str(stopped)]) == 0
    assert main(["eval", str(stopped)]) == 0
    kept, whole = losses(in_dir(trained_run, stopped)), losses(trained_run)
    assert kept == {step: whole[step] for step in kept}
    assert {*range(SAVED + 1, STEPS + 1)} <= kept.keys()


def test_a_whole_file_is_not_mentioned(stopped, trained_run, capsys):
    path = stopped / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])  # a kill while it wrote
    assert main(["train", str(stopped)]) == 0
    assert "metrics.jsonl" not in capsys.readouterr().out
    assert losses(in_dir(trained_run, stopped)) == losses(trained_run)
    assert not (stopped / "metrics.jsonl.damaged").exists()
