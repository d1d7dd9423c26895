"""Jobs of several processes on this machine, through `lmwright launch` and `lmwright jobs`."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from lmwright.cli.main import main
from lmwright.cloud import local
from lmwright.cloud.spec import (
    Limits,
    Spec,
    job_names,
    jobs_folder,
    load_spec,
    read_state,
    save_spec,
    write_state,
)
from lmwright.config.load import dump_toml
from lmwright.errors import UserError
from tests.saved_run import tiny_run

# A rank that needs no JAX: it beats, and does at each attempt what it was told.
RANK = """
import json, os, signal, sys, time
from lmwright.guard.heartbeat import beat
attempt, host = int(os.environ["LMWRIGHT_ATTEMPT"]), int(os.environ["JAX_PROCESS_ID"])
print("attempt", attempt, os.environ["JAX_COORDINATOR_ADDRESS"], flush=True)
beat("step", step=attempt, saved=attempt)
deeds = json.loads(sys.argv[1])
deed = deeds[min(attempt, len(deeds)) - 1][host]
if deed == "hang":
    time.sleep(600)
if deed == "term":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
    deed = "wait"
if deed == "wait":
    for _ in range(600):
        time.sleep(0.1)
        beat("step")
sys.exit(deed)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    return tmp_path


@pytest.fixture
def job(home):
    """Makes a job whose ranks do these deeds, and ends it afterwards."""
    specs = []

    def make(deeds, **limits):
        (home / "rank.py").write_text(RANK)
        spec = Spec(
            name=f"job-{len(specs)}",
            dir=str(home / "run"),
            command=(sys.executable, str(home / "rank.py"), json.dumps(deeds)),
            hosts=len(deeds[0]),
            port=local.free_port(),
            limits=Limits(step_floor_s=1.5, grace_s=2.0, **limits),
        )
        save_spec(spec)
        specs.append(spec)
        return spec

    yield make
    for spec in specs:
        local.end_agents(spec)


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return value


def agent(spec, host):
    return psutil.Process(int((spec.folder / f"agent-{host}.pid").read_text().split()[0]))


def test_a_job_comes_back_after_failures_and_hangs(job, capsys):
    spec = job([[1, "wait"], ["wait", "hang"], [42, 42], [0, 0]])
    local.supervise(spec)
    state = read_state(spec)
    assert (state["status"], state["attempt"], state["step"]) == ("done", 4, 4)
    assert main(["jobs", "show", spec.name]) == 0
    told = capsys.readouterr().out
    assert "no sign of life from the ranks on hosts 1 (step 2)" in told
    assert "rank 0 ended with exit code 1" in told
    stacks = (spec.folder / "stacks" / "host-1.2.txt").read_text()
    assert "rank.py" in stacks
    coordinators = {line for line in (spec.folder / "logs" / "host-0.log").read_text().split()}
    assert sum("127.0.0.1:" in word for word in coordinators) == 4  # a fresh one each time
    assert not list((spec.folder / "beats").iterdir())


def test_a_dead_agent_and_its_rank_are_replaced_together(job):
    spec = job([["wait", "wait", "wait"], ["wait", "wait", "wait"], [0, 0, 0]])
    local.supervise(spec, once=True)
    until(lambda: read_state(spec)["step"] == 1)
    ranks = [child for host in range(3) for child in agent(spec, host).children()]
    assert len(ranks) == 3
    os.kill(agent(spec, 1).pid, signal.SIGKILL)
    until(lambda: not any(rank.is_running() and rank.status() != "zombie" for rank in ranks))
    local.supervise(spec, once=True)
    until(lambda: read_state(spec)["step"] == 2)
    os.kill(agent(spec, 0).pid, signal.SIGSTOP)  # the leader with it
    local.supervise(spec)
    assert read_state(spec)["status"] == "done"


def test_a_supervisor_that_is_killed_as_an_agent_starts_leaves_its_number(job, monkeypatch):
    """Another one would start a second agent, and each would take the host from the other."""
    start, started = subprocess.Popen.__init__, []

    def killed(process, *words, **options):
        start(process, *words, **options)
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "__init__", killed)
    spec = job([["wait"]])
    for _ in range(2):  # the second finds the first one's
        with suppress(KeyboardInterrupt):
            local.keep_agent(spec, 0)
    assert [process.pid for process in started] == [agent(spec, 0).pid]
    assert local.agent(spec, 0) is not None


@pytest.mark.slow
def test_an_agent_that_is_told_to_end_lets_all_save_and_is_replaced(job):
    spec = job([["term", "term"], ["wait", "wait"], [0, 0]])
    local.supervise(spec, once=True)
    until(lambda: read_state(spec)["step"] == 1)
    for host in (1, 0):  # the second time the leader with it
        before = agent(spec, host)
        os.kill(before.pid, signal.SIGTERM)
        until(lambda: not before.is_running() or before.status() == "zombie")  # noqa: B023
        if host:
            local.supervise(spec, once=True)
            until(lambda: read_state(spec)["step"] == 2)
    local.supervise(spec)
    assert (read_state(spec)["status"], read_state(spec)["failures"]) == ("done", 0)


def test_verbs_look_after_a_job(job, capsys):
    spec = job([["wait", "wait"]])
    local.supervise(spec, once=True)
    until(lambda: read_state(spec)["step"] == 1)
    assert main(["jobs", "list"]) == 0
    assert "job-0" in capsys.readouterr().out
    assert main(["jobs", "forget", spec.name]) == 2
    assert "jobs stop job-0" in capsys.readouterr().err
    assert main(["jobs", "forget", spec.name, "--kill"]) == 0
    assert not spec.folder.exists()
    assert main(["jobs", "show", spec.name]) == 2
    assert "no job is called 'job-0'" in capsys.readouterr().err


def test_the_sessions_of_other_jobs_are_not_counted(job, home, capsys):
    """Another one may have trained in the run directory before it, or since."""
    spec, now = job([[2, 2]]), time.time()
    write_state(spec, read_state(spec) | {"status": "failed", "time": now + 60, "hosts": [0, 1]})
    session = {"seconds": 10.0, "first_step": 0, "last_step": 9, "spent": {"step": 5.0}}
    (home / "run").mkdir()
    ledger = home / "run" / "sessions.json"
    others = [session | {"began": now - 60}, session | {"began": now + 90}]
    for sessions, told in ((others, ""), ([*others, session | {"began": now + 30}], "of 10.0 s")):
        ledger.write_text(json.dumps(sessions))
        assert main(["jobs", "show", spec.name]) == 0
        out = capsys.readouterr().out
        assert "  hosts          2\n" in out and ("goodput " in out) == bool(told) and told in out


def test_a_failed_job_is_started_again(job, capsys):
    spec = job([[2], [0]])
    local.supervise(spec)
    assert read_state(spec)["status"] == "failed"
    assert main(["jobs", "start", spec.name]) == 0
    assert (read_state(spec)["status"], read_state(spec)["attempt"]) == ("done", 2)
    assert "done" in capsys.readouterr().err


def test_what_cannot_be_launched_is_refused(job):
    spec = job([[0]])
    with pytest.raises(UserError, match="there is a job 'job-0' already"):
        save_spec(spec)
    with pytest.raises(UserError, match="cannot name a job"):
        save_spec(replace(spec, name="../x"))
    for target in ("local:0x2", "local:two", "local:2x2x2"):
        with pytest.raises(UserError, match="not a local target"):
            local.parse(target)


def test_a_run_that_is_trained_already_makes_no_job(job, home, monkeypatch, capsys):
    """It would fail at once, and stay in the list."""
    run = tiny_run(home)
    file = home / "run.toml"
    file.write_text(dump_toml(run))
    words = ["launch", str(file), "--on", "local:1x1", "--detach"]
    monkeypatch.setattr("lmwright.cloud.command.begin", lambda *_: 0)
    (home / "run").mkdir()
    with open(home / "run" / ".lock", "w") as lock:  # as `lmwright train` has it
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(words) == 2
    assert "run is being trained by another process" in capsys.readouterr().err
    assert job_names() == [] and main(words) == 0
    assert main(words) == 2
    assert "is trained by job tiny-1 already, which is starting" in capsys.readouterr().err
    assert job_names() == ["tiny-1"] and main([*words, "--dry-run"]) == 0
    write_state(load_spec("tiny-1"), read_state(load_spec("tiny-1")) | {"status": "stopped"})
    assert main(words) == 0 and job_names() == ["tiny-1", "tiny-2"]


def test_a_job_is_whole_or_not_there(job, monkeypatch, capsys):
    """A full disk, a kill or a power loss in between leaves no name that is taken by no job."""

    def full(path, *_, **_options):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as at:
        at.setattr("lmwright.cloud.spec.write_whole", full)
        with pytest.raises(OSError, match="job-0") as error:
            job([[0]])
    assert error.value.filename == str(jobs_folder() / "job-0") and [*jobs_folder().iterdir()] == []
    spec = job([[0]])
    write_state(spec, read_state(spec) | {"status": "done"})

    def killed(folder, **_):
        os.unlink(os.path.join(folder, "job.json"))
        raise KeyboardInterrupt

    with monkeypatch.context() as at:
        at.setattr("shutil.rmtree", killed)
        assert main(["jobs", "forget", spec.name]) == 130
    capsys.readouterr()
    assert main(["jobs", "list"]) == 0 and "no jobs" in capsys.readouterr().err
    save_spec(spec)
    (spec.folder / "job.json").unlink()  # as earlier versions left it
    with pytest.raises(UserError, match="is there without a job; remove it"):
        save_spec(spec)


KILLED = """
import os, signal
from lmwright.cloud import spec
kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
job = spec.Spec(name="j", dir="", command=("true",), hosts=1, port=1)
"""


def test_what_a_killed_launch_or_forget_left_goes_with_the_next(home):
    """It has the job's token, and its command."""
    for number, words in enumerate(
        ("spec.write_whole = kill\nspec.save_spec(job)",
         "spec.save_spec(job)\nspec.shutil.rmtree = kill\nspec.remove_job(job)")
    ):  # fmt: skip
        subprocess.run([sys.executable, "-c", KILLED + words])
        assert len([*jobs_folder().iterdir()]) == number + 1 and len(job_names()) == number
        save_spec(Spec(name=f"k{number}", dir="", command=("true",), hosts=1, port=1))
        assert sorted(path.name for path in jobs_folder().iterdir()) == job_names()
    assert job_names() == ["k0", "k1"]


@pytest.mark.parametrize("text", ['{"name": "new", "a_field": 1}', "", "[]"])
def test_a_job_of_another_version_hides_no_other(job, capsys, text):
    spec, other = job([[0]]), jobs_folder() / "new"
    other.mkdir()
    (other / "job.json").write_text(text)
    assert main(["jobs", "list"]) == 0
    out = capsys.readouterr().out
    assert f"{spec.name} " in out and "new  " in out and "another version of lmwright" in out
    assert main(["jobs", "show", "new"]) == 2
    assert "job.json: is damaged, or was written by another version" in capsys.readouterr().err


def test_nobody_else_may_read_a_job(job):
    spec = job([[0]])
    assert load_spec(spec.name) == spec
    assert spec.folder.stat().st_mode & 0o077 == 0
    assert (spec.folder / "job.json").stat().st_mode & 0o077 == 0


@pytest.mark.slow  # a minute
def test_a_drill_loses_nothing(tmp_path):
    drill = subprocess.run(
        [
            sys.executable,
            "benchmarks/drill.py",
            "--faults",
            "3",
            "--hosts",
            "2",
            "--folder",
            tmp_path,
        ],
        capture_output=True,
        text=True,
    )
    assert drill.returncode == 0, drill.stdout + drill.stderr
