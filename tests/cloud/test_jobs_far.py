"""`lmwright jobs` on jobs whose state is in a bucket, and what is told of them."""

import gc
import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from lmwright.cli.main import main
from lmwright.cloud import jobs, remote
from lmwright.cloud.book import begin
from lmwright.cloud.slices import Slices
from lmwright.cloud.spec import START, dump_spec, job_names, load_spec, save_spec, write_state
from lmwright.cloud.target import settings_path
from lmwright.cloud.tell import Teller, last_words, notify
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from lmwright.storage.claim import TakenOver
from tests.cloud.fake_tpu import once
from tests.cloud.played import QUICK


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(remote, "DELETE_POLL_S", 0.01)
    monkeypatch.setattr(remote, "Slices", lambda spec, tell, _: Slices(spec, tell, QUICK))


@pytest.fixture
def told(tmp_path):
    """Lines that reach the user's command."""
    path = tmp_path / "told"
    settings_path().parent.mkdir(parents=True, exist_ok=True)
    settings_path().write_text(f'notify = "cat >> {path}"\n')
    return lambda: path.read_text() if path.exists() else ""


def test_forgetting_a_job_that_ended_alone_deletes_its_slice(played, spec, tpu, quick):
    played.until(tpu.active)
    played.slices.close()
    played.state(status="done", step=7)  # while nobody supervised
    save_spec(spec)
    tpu.faults = once("400", "DELETE")
    assert main(["jobs", "forget", "j"]) == 0
    assert tpu.resources == {} and Bucket(spec.url).entries() == {} and job_names() == []


def test_a_job_whose_slice_stays_is_not_forgotten(played, spec, tpu, quick, monkeypatch, capsys):
    played.until(tpu.active)
    played.slices.close()
    played.state(status="done")
    save_spec(spec)
    monkeypatch.setattr(remote, "DELETE_S", 0.1)
    monkeypatch.setattr(remote.end, "__defaults__", (0.1,))
    tpu.faults = once("400", "DELETE", times=1000)
    assert main(["jobs", "forget", "j"]) == 2
    assert "cannot be deleted now; try again" in capsys.readouterr().err
    assert job_names() == ["j"] and "job.json" in Bucket(spec.url).entries()
    tpu.faults = once("503", times=1000)
    assert main(["jobs", "forget", "j"]) == 2
    assert job_names() == ["j"]


def test_killing_a_job_ends_its_supervisor_too(played, spec, tpu, quick):
    played.until(tpu.active)
    played.beat(1)
    save_spec(spec)
    assert main(["jobs", "forget", "j"]) == 2
    assert main(["jobs", "forget", "j", "--kill"]) == 0
    assert tpu.resources == {}
    with pytest.raises(UserError, match="forgotten"):
        for _ in range(100):
            played.slices.step()
    assert tpu.resources == {}


def test_a_job_of_another_machine_whose_name_is_taken_here(spec, url, tpu, quick):
    other = replace(spec, url=f"{url}/other/jobs/j", token="another")
    begin(other, "c", "")
    save_spec(spec)
    assert remote.adopt(other.url).url == other.url
    assert load_spec("j").url == spec.url
    Bucket(other.url).write("state.json", json.dumps({**START, "status": "done"}))
    assert main(["jobs", "forget", other.url]) == 0
    assert job_names() == ["j"] and Bucket(other.url).entries() == {}


@pytest.mark.parametrize(
    "changes",
    [{"url": ""}, {"url": "", "cloud": None}, {"url": "gs://bkt/another"}, {"name": "../../j"}],
)
def test_a_folder_of_somebody_else_runs_no_command_here(spec, tmp_path, tpu, capsys, changes):
    """As a job of this machine would be, whose address is empty."""
    ran = tmp_path / "ran"
    theirs = replace(spec, command=("/bin/touch", str(ran)), hosts=1, **changes)
    Bucket(spec.url).write("job.json", dump_spec(theirs))
    for verb in ("follow", "show", "stop", "forget"):
        assert main(["jobs", verb, spec.url]) == 2
        assert "is not of a job in this folder" in capsys.readouterr().err
    assert job_names() == [] and not ran.exists()


def test_jobs_list_does_not_wait_for_a_service(spec, monkeypatch, capsys):
    for name in ("j", "k"):
        save_spec(replace(spec, name=name))
    monkeypatch.setattr(jobs, "LIST_S", 0.2)
    answer = {"j": lambda: START, "k": lambda: time.sleep(5)}
    monkeypatch.setattr(remote, "state_of", lambda spec: answer[spec.name]())
    began = time.monotonic()
    assert not main(["jobs", "list"])
    out = capsys.readouterr().out
    assert time.monotonic() - began < 4
    assert "starting" in out and f"unknown   {spec.url} is not reached" in out


def test_hosts_that_a_job_does_not_have(spec, capsys):
    save_spec(spec)
    assert main(["jobs", "logs", "j", "--host", "2"]) == 2
    assert "--host: 2 is none of 0 to 1" in capsys.readouterr().err


def test_a_job_that_was_given_up_starts_with_clean_hands(played, spec, quick):
    played.slices._facts |= {"bad_slices": 5, "failures": 7}
    played.slices._book.write()
    played.state(status="failed", error="5 slices in a row did no step")
    remote.restart(spec)
    assert played.book["bad_slices"] == played.book["failures"] == 0


def test_a_job_that_is_done_gets_no_slice_again(played, spec, tpu, quick, capsys):
    trains = replace(spec, command=("lmwright", "train", "run.toml"))
    played.state(status="done", step=7)
    with pytest.raises(
        UserError, match="is done at step 7, so you would pay for a slice for nothing"
    ):
        remote.restart(trains)
    assert remote.state_of(spec)["status"] == "done"
    remote.restart(spec)  # a command may do something else
    played.state(status="done", step=7)
    played.slices.close()
    remote.stop(spec)
    out = capsys.readouterr().out
    assert "job j is over already: done; looking for slices of it" in out and "saves" not in out
    assert not any(call[0] == "POST" for call in tpu.calls)


def test_events_reach_the_users_command(tmp_path, capsys):
    notify(f"cat >> {tmp_path}/told", "j-1: it is SUSPENDED; deleting it")
    assert (tmp_path / "told").read_text() == "j-1: it is SUSPENDED; deleting it\n"
    notify("exit 3", "x")
    assert "failed (exit code 3)" in capsys.readouterr().out


def test_settings_that_are_wrong_for_a_while_end_nothing(tpu, told, capsys):
    tell_ = Teller()
    tell_("one")
    settings_path().write_text("notify = [")
    tell_("two")
    tell_("three")
    assert [line for line in told().splitlines()] == ["one", "two", "three"]
    assert capsys.readouterr().out.count("cannot be read") == 1


def test_what_becomes_of_a_job_is_told(spec, tpu, told, quick):
    save_spec(spec)

    def hosts():
        while not tpu.active():
            time.sleep(0.01)
        bucket = Bucket(spec.url)
        bucket.write("events.log", "attempt 1: host 1 is lost; all ranks are ended\n")
        time.sleep(0.2)
        bucket.write("state.json", json.dumps({**START, "status": "done", "step": 7}))

    thread = threading.Thread(target=hosts)
    thread.start()
    assert remote.follow(spec) == 0
    thread.join()
    assert "asking for v4-16" in told() and "host 1 is lost" in told()
    assert "job j: done at step 7; no slice is left" in told()


def test_the_end_of_a_supervisor_is_told(spec, tpu, told, quick, monkeypatch, capsys):
    """To the user's command, and on the terminal: a slice without a supervisor costs money."""
    save_spec(spec)
    tpu.allowed = False
    with pytest.raises(UserError):
        remote.follow(spec)
    assert "the supervisor ends; `lmwright jobs follow j` takes" in capsys.readouterr().err
    assert "the supervisor ends: the requests in us-central2-b: project p refuses it" in told()
    assert "`lmwright jobs follow j` takes job j up again" in told()


@pytest.fixture
def no_collection():
    """JAX, which a supervisor never loads, hooks the garbage collector here, and Python drops what
    a signal raises inside such a hook."""
    gc.disable()
    yield
    gc.enable()


def test_a_supervisor_whose_job_another_has_taken_over_only_says_so(spec, tpu, told, capsys):
    with pytest.raises(TakenOver), last_words(Teller(), "nobody has it"):
        raise TakenOver("another has it")
    assert "the supervisor ends: another has it" in told() and "nobody" not in told()
    assert capsys.readouterr().err == ""


def test_a_supervisor_that_is_told_to_end_tells(spec, tpu, told, quick, no_collection, capsys):
    save_spec(spec)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as ended:
        remote.follow(spec)
    assert ended.value.code == 143
    assert "the supervisor ends: it was told to end" in told()
    assert "until then nobody replaces or deletes its slice" in capsys.readouterr().err
    Slices(spec, print, QUICK).close()  # the claim was given back


def test_events_of_jobs_on_this_machine_are_told(spec, told, monkeypatch, tpu):
    here = replace(spec, url="", cloud=None, offers=())
    save_spec(here)
    write_state(here, {**START, "status": "running"})

    def supervise(_spec):
        (here.folder / "events.log").write_text("00:00 attempt 1: rank 0 ended with signal 9\n")
        write_state(here, {**START, "status": "failed", "error": "rank 0", "step": 3})

    monkeypatch.setattr(jobs, "_supervise", supervise)
    assert jobs.follow(here) == 1
    assert "job j: 00:00 attempt 1: rank 0 ended with signal 9" in told()
    assert "job j: failed at step 3 rank 0" in told()


def test_the_last_error_shows_no_credentials(capsys):
    remote.show_state(START | {"error": "https://me:swordfish@example.com/data: no answer"})
    shown = capsys.readouterr().out
    assert "last error" in shown and "no answer" in shown and "swordfish" not in shown
