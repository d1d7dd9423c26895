"""Slices are asked for, watched, deleted and asked for again, through Google's client."""

import time
from dataclasses import replace

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from lmwright.cloud.book import spent, usage, waiting_since
from lmwright.cloud.slices import Slices
from lmwright.cloud.spec import Cloud, Spec
from lmwright.cloud.tpu_api import Tpus
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from tests.cloud.played import QUICK, Killed, Played, killed_after, offer


def test_a_job_that_is_done_leaves_nothing_behind(played, tpu):
    played.until(tpu.active)
    played.state(status="done", step=7)
    state = played.slices.run()
    assert (state["status"], tpu.resources) == ("done", {})
    [entry] = played.book["made"]
    assert entry["active"] <= entry["ended"]
    used = usage(played.spec, played.book)
    assert used["cost"] == pytest.approx(used["chip_hours"] * 3.0) and used["cost"] > 0


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED", "deleted by hand"])
@pytest.mark.parametrize("when", ["waiting", "active"])
def test_a_slice_that_is_lost_is_asked_for_again(played, tpu, state, when):
    played.until(tpu.active if when == "active" else lambda: tpu.resources)
    if state == "deleted by hand":
        tpu.delete_queuedResources("p", "us-central2-b", played.first, "", b"")
        played.slices._since -= 1  # a request is not made twice a moment later
    else:
        tpu.preempt("us-central2-b", played.first, state)
    played.until(lambda: list(tpu.resources) == [("us-central2-b", played.second)])
    assert sum(call[:2] == ("DELETE", "queuedResources") for call in tpu.calls) == (
        state != "deleted by hand"
    )


@pytest.mark.parametrize(
    ("node", "capacity", "replaced"),
    [
        ({"state": "PREEMPTED"}, "spot", True),
        ({"state": "TERMINATED"}, "spot", True),
        ({"health": "UNHEALTHY_MAINTENANCE"}, "spot", True),
        ({"state": "REPAIRING"}, "on-demand", False),
        ({"state": "TERMINATED"}, "reserved", False),
    ],
)
def test_bad_nodes(spec, tpu, node, capacity, replaced):
    spec = replace(spec, cloud=replace(spec.cloud, capacity=capacity))
    played = Played(spec)
    played.until(tpu.active)
    tpu.nodes["us-central2-b", played.first][played.first].update(node)
    if not replaced:  # the service does it, and is waited for
        played.slices._patience = replace(QUICK, repair=60)
        for _ in range(3):
            played.slices.step()
        assert list(tpu.resources) == [("us-central2-b", played.first)]
        played.slices._patience = QUICK
    played.until(lambda: ("us-central2-b", played.second) in tpu.resources)
    played.slices.close()


def test_a_silent_slice_is_replaced_and_one_that_speaks_is_kept(played, tpu):
    played.until(tpu.active)
    played.slices._patience = replace(QUICK, first_word=60, silence=60)
    rounds = iter(range(60))
    played.until(lambda: next(rounds, None) is None, speak=played.beat)
    assert list(tpu.resources) == [("us-central2-b", played.first)]
    played.slices._patience = QUICK
    played.until(lambda: ("us-central2-b", played.second) in tpu.resources)
    assert any("hosts do not report" in line or "no longer report" in line for line in played.told)


def test_without_capacity_the_next_offer_is_tried(spec, tpu):
    tpu.stuck.add("us-central2-b")
    played = Played(replace(spec, offers=(offer(), offer("us-east5-a"))))
    played.until(tpu.active)
    assert list(tpu.resources) == [("us-east5-a", played.second)]
    played.slices.close()


def test_without_quota_the_next_offer_is_tried_and_the_reason_is_told(spec, tpu):
    tpu.quota["us-central2-b"] = False
    played = Played(replace(spec, offers=(offer(), offer("us-east5-a"))))
    played.until(tpu.active)
    assert any("Quota limit" in line for line in played.told)
    played.slices.close()


def test_a_bad_slice_is_replaced_and_the_users_mistake_is_not(played, tpu):
    played.until(tpu.active)
    played.state(status="failed", error="rank 0: Failed to establish SliceBuilder grpc channel")
    played.until(lambda: ("us-central2-b", played.second) in tpu.resources)
    assert played.slices.state()["status"] == "starting"
    played.until(tpu.active)
    played.state(status="failed", error="rank 0: model.dim: no such field")
    assert played.slices.run()["status"] == "failed"
    assert tpu.resources == {}


@pytest.mark.parametrize("serving", [True, False])
def test_stop_deletes_what_does_not_end(played, tpu, serving):
    played.until(tpu.active if serving else lambda: tpu.resources)
    played.bucket.write("stop", "stopped as asked")
    assert played.slices.run()["status"] == "stopped"
    assert tpu.resources == {}


def test_a_spent_budget_ends_the_job(spec, tpu):
    played = Played(replace(spec, cloud=replace(spec.cloud, max_cost=1e-9)))
    state = played.slices.run()
    assert state["status"] == "stopped" and "1e-09 USD" in state["error"]
    assert tpu.resources == {}
    played.slices.close()


@pytest.mark.parametrize(
    "limit, reached, said",
    [("hours", 2.0, "2 h"), ("chip_hours", 32.0, "32 chip-hours"), ("cost", 48.0, "48 USD")],
)
def test_each_limit_is_reached_at_its_own_figure(limit, reached, said):
    """Slices of 16 chips at 1.5 USD for an hour and a half and for half an hour, and a request
    that got none."""
    of = replace(offer(), num_chips=16, price=1.5)
    spec = Spec(name="j", dir="d", command=("train",), hosts=2, port=0, url="u", offers=(of,))
    made = [
        {"offer": 0, "asked": 0.0, "active": 600.0, "ended": 6000.0, "deleted": 9000.0},
        {"offer": 0, "asked": 9000.0, "ended": 20000.0},
        {"offer": 0, "asked": 20000.0, "active": 30000.0, "ended": 31800.0},
    ]
    used = usage(spec, {"made": made})
    assert used == {"hours": 2.0, "chip_hours": 32.0, "cost": 48.0}
    assert spent(Cloud(project="p", **{f"max_{limit}": reached}), used) == (
        f"the limit of {said} is reached"
    )
    assert spent(Cloud(project="p", **{f"max_{limit}": reached * 1.001}), used) == ""


def test_a_wait_begins_with_the_first_request_after_the_last_slice():
    """By it `valid_hours` ends a job that gets no slice."""
    got, none = {"active": 1.0}, {}
    asked = lambda *made: {"made": [{"asked": 10.0 * n} | e for n, e in enumerate(made)]}  # noqa: E731
    assert waiting_since(asked()) is None
    assert waiting_since(asked(none, none)) == 0.0
    assert waiting_since(asked(none, got)) is None
    assert waiting_since(asked(none, got, none, none)) == 20.0


@pytest.mark.parametrize("moment", range(8))
def test_a_supervisor_killed_anywhere_leaves_no_orphan(spec, tpu, monkeypatch, moment):
    """The bucket or the service refuses the call of that number, as if the process had ended."""
    counted = killed_after(moment)

    first = Played(spec)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "write", counted(Bucket.write))
        patch.setattr(Tpus, "create", counted(Tpus.create))
        with pytest.raises(Killed):
            for _ in range(50):
                first.slices.step()
                first.beat(0)
    first.slices.close()
    second = Played(spec)
    second.until(tpu.active)
    assert len(tpu.resources) == 1
    second.state(status="done")
    second.slices.run()
    assert tpu.resources == {}
    second.slices.close()


def test_hosts_of_a_slice_that_is_repaired_may_be_silent(played, tpu, monkeypatch):
    patience = replace(QUICK, first_word=0.2, silence=0.05, repair=5.0)
    monkeypatch.setattr(played.slices, "_patience", patience)
    played.until(tpu.active)
    node = tpu.nodes["us-central2-b", played.first][played.first]
    node["state"] = "REPAIRING"
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        played.slices.step()
    assert list(tpu.resources) == [("us-central2-b", played.first)]
    node["state"] = "READY"
    second = [("us-central2-b", played.second)]
    played.until(lambda: list(tpu.resources) == second, speak=False)


def test_one_supervisor_at_a_time(played, spec):
    with pytest.raises(UserError, match="is supervised by"):
        Slices(spec, print, QUICK)


def test_refusals(spec, tpu, monkeypatch):
    tpu.allowed = False
    with pytest.raises(UserError, match=r"roles/tpu\.admin"):
        Tpus(spec.cloud).requests("us-central2-b")
    tpu.allowed = True
    with pytest.raises(UserError, match="check --project and --zone"):
        Tpus(spec.cloud).requests("us-nowhere1-a")


def test_requests_say_what_was_asked_for(spec, tpu):
    cloud = Cloud(
        project="p", capacity="reserved", reservation="projects/p/locations/z/reservations/r",
        service_account="a@b", disks=("projects/p/zones/z/disks/d",), valid_hours=2,
        external_ips=False,
    )  # fmt: skip
    Tpus(cloud).create("x", "j", replace(offer(), num_slices=2), {})
    [body] = tpu.bodies
    node = body["tpu"]["nodeSpec"][0]
    assert node["multisliceParams"] == {"nodeCount": 2, "nodeIdPrefix": "x"}
    assert "schedulingConfig" not in node["node"]  # gcloud names the reservation only
    assert node["node"]["dataDisks"][0]["mode"] in (2, "READ_ONLY")
    assert node["node"]["serviceAccount"]["scope"] == [
        "https://www.googleapis.com/auth/cloud-platform"
    ]
    assert not node["node"]["networkConfig"].get("enableExternalIps")
    assert body["queueingPolicy"] == {"validUntilDuration": "7200s"}
    assert body["reservationName"].endswith("/z/reservations/r") and "guaranteed" not in body
    for name, path in (("", "us-central2-b/reservations/-"), ("r", "us-central2-b/reservations/r")):
        Tpus(replace(cloud, reservation=name)).create("y", "j", offer(), {})
        assert tpu.bodies[-1]["reservationName"] == f"projects/p/locations/{path}"
        tpu.resources.clear()
    assert node["node"]["metadata"]["startup-script"].startswith("#!/bin/bash")
