"""Slices under services that fail: nothing paid for is forgotten, nothing is asked for twice."""

import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from google.auth import compute_engine
from google.auth.exceptions import TransportError

from lmwright.cloud import compute_api, watch
from lmwright.cloud.book import begin, id_of, label_of
from lmwright.cloud.service import Away
from lmwright.cloud.slices import Slices
from lmwright.cloud.tpu_api import Tpus
from lmwright.errors import StorageError, UserError
from lmwright.storage.bucket import Bucket
from tests.cloud.fake_tpu import once, refused
from tests.cloud.played import QUICK, Played, offer

HERE, THERE = "us-central2-b", "us-east5-a"


@pytest.mark.parametrize(
    ("method", "kind", "fault"),
    [
        ("GET", "queuedResources", "429"),
        ("GET", "queuedResources", "500"),
        ("GET", "queuedResources", "reset"),
        ("GET", "nodes", "429"),
        ("GET", "nodes", "502"),
        ("POST", "", "429"),
        ("POST", "", "409"),
        ("POST", "", "503"),
        ("POST", "", "lost"),
        ("DELETE", "", "504"),
        ("DELETE", "", "409"),
        ("DELETE", "", "lost"),
    ],
)
def test_a_service_that_does_not_answer_is_asked_again(played, tpu, method, kind, fault):
    if method == "POST":
        tpu.faults = once(fault, method, kind, times=2)
    played.until(tpu.active)
    if method != "POST":
        tpu.faults = once(fault, method, kind, times=2)
        played.slices.step()
    played.slices.step()
    assert list(tpu.resources) == [(HERE, played.first)]
    played.state(status="done", step=7)
    assert played.slices.run()["status"] == "done"
    assert tpu.resources == {} and tpu.asked == {(HERE, played.first): 1}
    told = any("trying again" in line for line in played.told)
    assert told or (method, fault) == ("DELETE", "409")  # is told again anyway


def test_the_first_failure_and_the_end_of_an_outage_are_told_once(played, tpu):
    played.until(tpu.active)
    played.slices._patience = replace(QUICK, first_word=60)
    tpu.faults = once("503", times=5)
    for _ in range(12):
        played.slices.step()
        played.slices._rest = 0.0
    assert sum("trying again" in line for line in played.told) == 1
    assert "the services answer again" in played.told


def test_a_bucket_that_does_not_answer_is_waited_for(played, tpu, proxy, monkeypatch):
    played.until(tpu.active)
    monkeypatch.setattr("lmwright.storage.bucket.PATIENCE_S", 0.5)
    proxy.faults = type(proxy.faults)(1.0, kinds=("503", "reset"))
    assert played.slices.step() is None
    proxy.faults = type(proxy.faults)()
    assert "trying again" in played.told[-1]
    played.state(status="done", step=7)
    assert played.slices.run()["status"] == "done"
    assert tpu.resources == {}


def test_a_bucket_that_refuses_ends_the_supervisor(played, tpu, monkeypatch):
    played.until(tpu.active)

    def gone(*_):
        raise UserError("gs://b: this account may not")

    monkeypatch.setattr(Bucket, "read", gone)
    with pytest.raises(UserError, match="may not"):
        played.slices.step()


def test_an_outage_is_not_held_against_hosts(played, tpu):
    played.until(tpu.active)
    played.state(step=1)
    played.slices.step()
    played.slices._watch.heard -= 60  # seconds in which nobody could be asked
    tpu.faults = once("503")
    played.slices.step()
    played.slices.step()
    assert list(tpu.resources) == [(HERE, played.first)]


def test_a_read_that_is_turned_away_forgets_no_slice(spec, tpu):
    played = Played(replace(spec, offers=(offer(), offer(THERE))))
    played.until(tpu.active)
    tpu.faults = once("429", "GET", times=3)
    for _ in range(20):
        played.slices.step()
        played.beat(0)
    assert list(tpu.resources) == [(HERE, played.first)]
    played.slices.close()


def test_what_an_earlier_launch_left_in_any_zone_is_deleted(spec, tpu):
    spec = replace(spec, offers=(offer(), offer(THERE)))
    Tpus(spec.cloud).create("left", label_of(spec), offer(THERE), {})
    played = Played(spec)
    played.until(tpu.active)
    assert list(tpu.resources) == [(HERE, played.first)]
    Tpus(spec.cloud).create("late", label_of(spec), offer(THERE), {})
    played.state(status="done")
    played.slices.run()
    assert tpu.resources == {}
    played.slices.close()


@pytest.mark.parametrize("answer", ["400", "409"])
def test_a_delete_that_is_refused_for_now_is_told_again(played, tpu, answer):
    played.until(tpu.active)
    tpu.faults = once(answer, "DELETE", times=3)
    played.state(status="done", step=7)
    assert played.slices.run()["status"] == "done"
    assert tpu.resources == {}


def test_a_slow_delete_is_waited_for(played, tpu):
    played.until(tpu.active)
    tpu.slow_deletes = 5
    played.state(status="done", step=7)
    assert played.slices.run()["status"] == "done"
    assert tpu.resources == {}
    assert sum(call[0] == "DELETE" for call in tpu.calls) == 1


def test_a_request_that_is_refused_as_wrong_is_told(played, tpu):
    tpu.post_queuedResources = lambda *_: refused(400, "INVALID_ARGUMENT", "no such runtime")
    with pytest.raises(UserError, match="the service refuses it: no such runtime"):
        played.slices.step()


def test_a_job_of_the_same_name_elsewhere_is_another(spec, tpu, url):
    ours, theirs = Played(spec), replace(spec, url=f"{url}/other/jobs/j", token="another")
    ours.until(tpu.active)
    begin(theirs, "c", "")
    other = Played(theirs)
    other.until(lambda: len(tpu.active()) == 2)
    assert ours.first != other.first
    other.state(status="done")
    other.slices.run()
    assert list(tpu.resources) == [(HERE, ours.first)]
    other.slices.close()
    ours.slices.close()


def test_a_job_that_is_launched_again_has_other_requests(spec):
    again = replace(spec, token="another")
    assert id_of(spec, 1) != id_of(again, 1)
    assert label_of(spec) == label_of(again)  # so that it finds what the first has left
    assert len(id_of(replace(spec, name="n" * 42), 999)) <= 57 and len(label_of(spec)) <= 63


def test_hosts_that_never_speak_end_the_job_at_last(spec, tpu):
    played = Played(replace(spec, limits=replace(spec.limits, failures=3)))
    played.slices._patience = replace(QUICK, first_word=0.05)
    state = played.slices.run()
    assert state["status"] == "failed" and tpu.resources == {}
    assert "3 slices in a row did no step" in state["error"]
    assert "Private Google Access" in state["error"]
    assert len(tpu.asked) == 3
    played.slices.close()


def test_what_hosts_that_cannot_start_wrote_is_shown(spec, tpu):
    played = Played(replace(spec, limits=replace(spec.limits, failures=1)))
    played.bucket.write(f"console/{played.first}-0.log", "fetched\npip: no space left\n")
    played.slices._patience = replace(QUICK, first_word=0.05)
    assert "do not start: pip: no space left (gs://" in played.slices.run()["error"]
    played.slices.close()


def test_after_a_bad_start_progress_counts(played, tpu):
    played.slices._patience = replace(QUICK, first_word=0.05)
    played.until(lambda: played.book["bad_slices"] == 1)
    played.slices._patience = replace(QUICK, first_word=60)
    played.until(lambda: tpu.active() == [(HERE, played.second)])
    played.slices.step()
    played.state(step=1)
    played.slices.step()
    assert played.book["bad_slices"] == played.book["failures"] == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_quota_of_zero_is_told_at_once(spec, tpu, count):
    tpu.quota = dict.fromkeys(tpu.quota, False)
    played = Played(replace(spec, offers=(offer(), offer(THERE))[:count]))
    state = played.slices.run()
    assert state["status"] == "failed" and tpu.resources == {}
    assert re.match(r"--on: .*Quota limit .* is 0; ask for quota there", state["error"])
    assert sum(call[0] == "POST" for call in tpu.calls) == count
    played.slices.close()


def test_a_quota_of_zero_that_is_told_later_ends_the_job_too(played, tpu):
    played.until(lambda: tpu.resources)
    told = {"error": {"code": 8, "message": "Quota limit 'TPUV4' has been exceeded. Limit: 0"}}
    tpu.resources[HERE, played.first]["state"] = {"state": "FAILED", "failedData": told}
    state = played.slices.run()
    assert "--on: v4-16 in us-central2-b: Quota limit 'TPUV4' has been exc" in state["error"]
    assert tpu.resources == {} and len(tpu.asked) == 1


def test_without_quota_after_a_slice_it_goes_on_asking(played, tpu):
    played.until(tpu.active)
    tpu.quota[HERE] = False
    tpu.preempt(HERE, played.first)
    for _ in range(30):
        played.slices.step()
    tpu.quota[HERE] = True
    played.until(tpu.active)


def test_a_request_waits_as_long_as_the_user_wants(spec, tpu):
    tpu.stuck = {HERE, THERE}
    cloud = replace(spec.cloud, valid_hours=0.5 / 3600)
    played = Played(replace(spec, cloud=cloud, offers=(offer(), offer(THERE))))
    state = played.slices.run()
    assert state["status"] == "failed" and "--valid-hours" in state["error"]
    assert tpu.resources == {}
    played.slices.close()


@pytest.mark.parametrize("name", ["host-1.log", "host-1/000001.log"])
def test_a_reason_that_is_in_the_log_only_is_found(played, tpu, name):
    played.until(tpu.active)
    log = "--- attempt 1\nDevice or resource busy\n--- attempt 2\nF0101 TPU initialization failed\n"
    if "/" in name:  # in pieces
        played.bucket.write("logs/host-1/000000.log", "--- attempt 0\nchips are missing\n")
    played.bucket.write(f"logs/{name}", log)
    played.state(status="failed", error="5 failures in a row, the last: rank 1 ended with signal 6")
    played.until(lambda: (HERE, played.second) in tpu.resources)
    assert any("a bad slice: F0101 TPU initialization failed" in line for line in played.told)


@pytest.mark.parametrize(
    ("state", "log"),
    [
        ({"status": "failed", "error": "rank 1 ended with exit code 2: x"}, "No TPU devices\n"),
        ({"status": "failed", "error": "rank 1 ended with signal 6"}, "--- attempt 2\nother\n"),
        ({"status": "waiting", "error": "rank 1 ended with signal 6"}, "No TPU devices\n"),
    ],
)
def test_what_another_slice_does_not_cure(spec, state, log):
    bucket = Bucket(spec.url)
    bucket.write("logs/host-0.log", f"--- attempt 1\nNo TPU devices\n--- attempt 2\n{log}")
    assert watch.bad_slice(bucket, state) == ""


@pytest.mark.parametrize("status", ["waiting", "failed"])
def test_a_device_that_computes_wrongly_is_given_back(played, tpu, status):
    played.until(tpu.active)
    played.state(status=status, error="rank 1 ended with exit code 47: other bits on host 1")
    played.until(lambda: (HERE, played.second) in tpu.resources)
    assert played.book["bad_slices"] == 1


def test_a_book_in_which_another_has_written_is_not_overwritten(played, tpu):
    played.until(tpu.active)
    played.bucket.write("slices.json", json.dumps(played.book | {"writer": "other"}))
    with pytest.raises(UserError, match="another supervisor has taken the job over"):
        for _ in range(100):
            played.slices.step()
    assert len(tpu.asked) == 1


def test_a_job_that_was_forgotten_is_not_asked_for_again(played, tpu):
    played.until(tpu.active)
    for name in played.bucket.entries():
        if "supervisor" not in name:
            played.bucket.remove(name)
    tpu.resources.clear()
    with pytest.raises(UserError, match="or it was forgotten"):
        for _ in range(100):
            played.slices.step()
    assert tpu.resources == {}


def test_events_of_the_leader_are_told(played, tpu):
    played.bucket.write("events.log", "before\n")
    played.until(tpu.active)
    played.bucket.write("events.log", "before\nattempt 1: host 1 is lost\nhal")
    played.slices.step()
    assert "attempt 1: host 1 is lost" in played.told and "before" not in played.told


def test_no_credentials_and_a_wrong_project(spec, tpu, monkeypatch, tmp_path):
    tpu.allowed = False
    with pytest.raises(UserError, match="project p refuses it"):
        Tpus(spec.cloud).accelerator_types(HERE)
    monkeypatch.delenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(UserError, match="run: gcloud auth application-default login"):
        Tpus(spec.cloud)


def test_a_person_is_charged_to_the_project(spec, tpu, monkeypatch, tmp_path):
    from lmwright.cloud.tpu_api import NO_CREDENTIALS, credentials_for

    monkeypatch.delenv(NO_CREDENTIALS)
    known = {"type": "authorized_user", "client_id": "c", "client_secret": "s"}
    (tmp_path / "adc.json").write_text(json.dumps(known | {"refresh_token": "r"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "adc.json"))
    assert credentials_for("p").quota_project_id == "p"


def test_a_supervisor_that_cannot_begin_leaves_no_claim(spec, tpu, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("lmwright.cloud.slices.Book", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Slices(spec, print, QUICK)
    Slices(spec, print, QUICK).close()


def test_away_is_a_sentence(spec, tpu):
    tpu.server.shutdown()
    tpu.server.server_close()
    with pytest.raises(Away, match=r"is not reached .*check the network"):
        Tpus(spec.cloud).requests(HERE)


def test_a_token_of_a_host_that_does_not_come_is_waited_for(spec, tpu, monkeypatch):
    """As Google's own credentials of a machine tell it: a slice that deletes itself is not to stay
    for that, nor a training to end."""
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda _: None)
    monkeypatch.setattr(compute_api, "PAUSE_S", 0.0)

    def refused(**_):
        raise TransportError("Connection refused")

    def ask(*_, **__):
        compute_engine.Credentials().refresh(refused)

    with pytest.raises(Away, match="there is no token now"), Tpus(spec.cloud)._told("the slice"):
        ask()
    with pytest.raises(StorageError), Bucket(spec.url)._told("read"):
        ask()
    compute = compute_api.Compute("p")
    monkeypatch.setattr(compute._session, "request", ask)
    with pytest.raises(UserError, match=r"does not answer \(there is no token now\)"):
        compute.get("us-central1-a", "disks", "d")
