"""Other work than training: `launch --do VERB` and `launch -- COMMAND`, as a user types them."""

import os
import sys

import pytest

from lmwright.cli.main import main
from lmwright.cloud import command
from lmwright.cloud.command import Wanted
from lmwright.cloud.spec import Limits, load_spec, read_state
from lmwright.cloud.target import Settings
from lmwright.cloud.work import limits_by_size
from lmwright.config.load import dump_toml
from lmwright.formats.open import load_noted
from tests.saved_run import save_run, tiny_run

RANK = """
import os
print("rank", os.environ["JAX_PROCESS_ID"], "of", os.environ["JAX_NUM_PROCESSES"], os.getcwd())
raise SystemExit(0 if os.environ["LMWRIGHT_ATTEMPT"] == "2" else 3)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(home):
    run = tiny_run(home)
    save_run(run)
    (home / "run.toml").write_text(dump_toml(run))
    return run


def test_a_command_runs_on_all_hosts_and_comes_back(home, capsys):
    (home / "rank.py").write_text(RANK)
    words = ["launch", "--on", "local:2x1", "--name", "c", "--", "python", "rank.py"]
    assert main([*words[:-3], "--dry-run", *words[-3:]]) == 0
    assert "python rank.py" in capsys.readouterr().out
    assert main(words) == 0
    assert f"rank 0 of 2 {home}" in capsys.readouterr().out
    state = read_state(load_spec("c"))
    assert (state["status"], state["attempt"]) == ("done", 2)
    assert main(["jobs", "logs", "c", "--host", "1"]) == 0
    assert "rank 1 of 2" in capsys.readouterr().out
    assert main(["jobs", "forget", "c"]) == 0
    assert capsys.readouterr().out == "job c is forgotten\n"


def test_a_command_that_is_not_there_fails_the_job(home, capsys):
    words = ["--on", "local:1x1", "--name", "c", "--failures", "1", "--", "no-such-program"]
    assert main(["launch", *words]) == 1
    assert "no-such-program" in capsys.readouterr().err


def test_a_verb_runs_on_one_host(trained, home, capsys):
    words = ["launch", "run.toml", "--on", "local:1x1"]
    assert main([*words, "--do", "eval", "--", "--text", "text.jsonl", "--context", "16"]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main([*words, "--do", "prepare"]) == 0
    assert "short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run.toml", "--on", "local:2x1", "--do", "eval"], "eval runs on one host, and local:2x1"),
        (["run.toml", "--on", "kaggle", "--", "ls"], "only training can be launched there"),
        (["--on", "kaggle", "--", "ls"], "only training can be launched there"),
        (["--on", "local:2x1"], "Missing argument 'RUN'"),
        (["--on", "local:2x1", "--do", "eval", "--", "x"], "Missing argument 'RUN'"),
        (["run.toml", "--on", "local:1x1", "--do", "sing"], "'sing' is not one of"),
    ],
)
def test_what_is_refused(trained, capsys, words, told):
    assert main(["launch", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("on", "words", "told"),
    [
        ("local:2x1", ["--max-hours", "3"], "--max-hours: has no effect here, it is for slices"),
        ("ssh:hosts.txt", ["--max-cost", "9"], "--max-cost: has no effect here, it is for slices"),
        ("kaggle", ["--spot"], "--spot, --on-demand and --guaranteed: has no effect here"),
        ("local:2x1", ["--secret", "A=b"], "--secret: has no effect here"),
        (
            "local:2x1",
            ["--queue", "q"],
            "--queue: has no effect here, it is only for --on gke:CLUSTER",
        ),
        ("v4-8", ["--remote-python", "p"], "--remote-python: has no effect here, it is for --on"),
        ("gke:c", ["--remote-python", "p"], "--remote-python: has no effect here, on gke:"),
    ],
)
def test_an_option_without_effect_is_refused(home, capsys, on, words, told):
    """Above all a limit on what may be spent."""
    assert main(["launch", "--on", on, *words, "--", "ls"]) == 2
    assert told in capsys.readouterr().err


def test_limits_grow_with_what_has_to_be_read():
    full, _ = load_noted("examples/kisoku-3b.toml")
    adapters, _ = load_noted("examples/kisoku-3b.toml", ["lora.rank=8"])
    # 3.33e9 parameters; AdamW keeps two more numbers of each that is trained
    for run, size in ((full, 12 * 3.326e9), (adapters, 4 * 3.326e9)):
        limits = limits_by_size(Limits(), run)
        assert limits.restore_s == pytest.approx(300 + size / 50e6, rel=0.01)
        assert limits.beside_s - Limits().beside_s == pytest.approx(limits.restore_s - 300)
        assert (limits.start_s, limits.step_floor_s) == (Limits().start_s, Limits().step_floor_s)


@pytest.mark.parametrize("on", ["local:2x1", "ssh:hosts.txt", "v4-32"])
def test_limits_by_size_hold_wherever_a_run_is_launched(on, monkeypatch, tmp_path):
    told = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "save_spec", lambda spec: told.append(spec.limits))
    monkeypatch.setattr(command, "begin", lambda spec, detach: 0)
    monkeypatch.setattr(command, "_check_for_slices", lambda *_: None)
    monkeypatch.setattr(command.remote, "launch", lambda spec, *_, **__: told.append(spec.limits))
    by_ssh = "lmwright.cloud.ssh.launch.launch"
    monkeypatch.setattr(by_ssh, lambda *words, **_: told.append(words[5]))
    run, _ = load_noted("examples/kisoku-3b.toml", ["dir=gs://bkt/run"])
    place = Settings(zone="us-central2-b", project="p")
    command.launch_command(run, "run.toml", (), Wanted(on=on, name="j", settings=place))
    assert told == [limits_by_size(Limits(), run)]
