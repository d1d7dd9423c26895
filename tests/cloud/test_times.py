"""What a slice costs that came, trained and went while no supervisor was there."""

import json
import time
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from lmwright.cloud import remote
from lmwright.cloud.book import MADE, usage
from lmwright.cloud.leader import Leader
from lmwright.cloud.ledger import slice_variable
from lmwright.cloud.times import fill_in
from lmwright.report.paid import VARIABLE
from tests.cloud.played import Played

HOUR = 3600.0


def rewrite(played, **facts):
    """The book with other times of its present slice, as a supervisor had left it."""
    book = played.book
    book["made"][book["current"]].update(facts)
    played.bucket.write(MADE, json.dumps(book))


def serves(played, began, **state):
    """What the first host and the leader of the first slice write."""
    facts = {"slice": played.first, "address": "10.0.0.1", "began": began}
    played.bucket.write("leader.json", json.dumps(facts))
    played.state(attempt=3, **state)


def asked_for(spec, tpu):
    """A job whose supervisor ended when it had asked for a slice."""
    played = Played(spec)
    played.until(lambda: tpu.resources)
    played.slices.close()
    return played


@pytest.mark.parametrize("lost", ["SUSPENDED", "gone"])
def test_a_slice_lost_unwatched_counts_until_its_last_word(spec, tpu, lost):
    spec = replace(spec, cloud=replace(spec.cloud, max_hours=10.0))
    before, now = Played(spec), time.time()
    before.until(tpu.active)
    before.slices.close()
    rewrite(before, active=now - 50 * HOUR)
    serves(before, now - 50 * HOUR, step=9, time=now - 49 * HOUR)
    tpu.preempt("us-central2-b", before.first)
    if lost == "gone":
        tpu.resources.clear()
    after = Played(spec)
    after.until(lambda: ("us-central2-b", after.second) in tpu.resources)
    assert after.bucket.entry("stop") is None  # one hour of ten is spent
    used = usage(spec, after.book)
    assert used["hours"] == pytest.approx(1, abs=0.01)
    assert used["cost"] == pytest.approx(1 * 8 * 3.0, abs=0.1)
    after.slices.close()


def test_a_budget_that_is_spent_by_a_slice_that_is_there_ends_the_job(spec, tpu):
    spec = replace(spec, cloud=replace(spec.cloud, max_hours=10.0))
    before, now = Played(spec), time.time()
    before.until(tpu.active)
    before.slices.close()
    rewrite(before, active=now - 50 * HOUR)
    serves(before, now - 50 * HOUR, step=9, time=now - 49 * HOUR)  # its host 0 hangs
    after = Played(spec)
    assert after.slices.run()["status"] == "stopped"
    assert tpu.resources == {}
    assert usage(spec, after.book)["hours"] == pytest.approx(50, abs=0.01)
    after.slices.close()


def test_a_slice_that_nobody_saw_come_is_counted(spec, tpu):
    before, now = asked_for(spec, tpu), time.time()
    while not tpu.active():
        before.slices._service.request("us-central2-b", before.first)
    serves(before, now - 20 * HOUR, step=9, time=now)
    after = Played(spec)
    after.until(lambda: "active" in after.book["made"][0])
    assert usage(spec, after.book)["hours"] == pytest.approx(20, abs=0.01)
    after.slices.close()


def test_sessions_know_when_a_slice_came_that_nobody_saw(spec, tpu):
    """Also those of a host that has begun again."""
    before, now = asked_for(spec, tpu), time.time()
    rewrite(before, asked=now - 21 * HOUR)
    serves(before, now - 20 * HOUR, step=9, time=now)
    facts = json.loads(slice_variable(spec, before.first)[VARIABLE])
    assert facts["active"] == pytest.approx(now - 20 * HOUR, abs=1)
    assert facts["queue_s"] == pytest.approx(HOUR, abs=1)


@pytest.mark.parametrize("there", [True, False])
def test_show_tells_what_a_job_has_cost_that_ended_unwatched(spec, tpu, capsys, there):
    """A slice deletes itself ten minutes after the end."""
    before, now = asked_for(spec, tpu), time.time()
    serves(before, now - 31 * HOUR, status="done", step=9, time=now - 11 * HOUR)
    if not there:
        tpu.resources.clear()
    remote.show(spec)
    hours = 31 if there else 20 + 1 / 6
    chips = hours * 8
    told = capsys.readouterr().out
    assert f"1, {hours:.2f} h, {chips:.1f} chip-hours, {chips * 3:.2f} USD by the list" in told


def test_events_of_all_machines_are_told_in_the_zone_of_this_one(spec, tpu, capsys, monkeypatch):
    def move(zone):
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    player = Played(spec)
    try:
        move("UTC")  # of the slices
        spec.folder.mkdir(parents=True)
        Leader(spec)._note("attempt 1: host 1 is lost")
        player.bucket.write("events.log", (spec.folder / "events.log").read_bytes())
        move("America/Los_Angeles")
        player.until(lambda: tpu.resources)
        remote.show(spec)
    finally:
        player.slices.close()
        monkeypatch.undo()
        time.tzset()
    lines = capsys.readouterr().out.splitlines()
    stamps = [
        datetime.strptime(line.strip()[:19], "%Y-%m-%d %H:%M:%S")
        for line in lines
        if "asking for" in line or "host 1 is lost" in line
    ]
    assert len(stamps) == 2
    assert abs((stamps[0] - stamps[1]).total_seconds()) < 60


def test_clocks_and_words_of_others_cost_nothing(spec):
    """A host whose clock is ahead began no later than now, and what the leader of an earlier slice
    said last is not when this one ended."""
    now = time.time()
    facts = json.dumps({"slice": "mine", "began": now + HOUR}).encode()
    bucket = SimpleNamespace(read=lambda name: (facts, None))
    entry = {"id": "mine"}
    fill_in(entry, spec, bucket, {"status": "running", "time": now}, "ACTIVE")
    assert entry.keys() == {"id", "active"} and entry["active"] == pytest.approx(now, abs=60)
    entry = {"id": "mine", "active": now - 100}
    fill_in(entry, spec, bucket, {"status": "running", "time": now - HOUR}, "GONE")
    assert entry["ended"] == pytest.approx(now, abs=60)
