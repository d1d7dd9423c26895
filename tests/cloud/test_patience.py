"""When a supervisor gives a job up: what it counts, without a service that is asked."""

import time
from types import SimpleNamespace

import pytest

from lmwright.cloud.slices import Patience, Slices

STATE = {"status": "starting", "step": 0, "error": ""}


def supervisor(*made, offers=2, valid_hours=0.0, failures=5, gke=None):
    """A supervisor of a job on so many offers, that has asked for what is `made`."""
    slices = object.__new__(Slices)
    slices._facts = {
        "made": list(made),
        "offer": 0,
        "failures": 0,
        "bad_slices": 0,
        "current": None,
    }
    slices._spec = SimpleNamespace(
        name="job", offers=("a", "b", "c")[:offers], limits=SimpleNamespace(failures=failures)
    )
    slices._service = SimpleNamespace(cloud=SimpleNamespace(gke=gke, valid_hours=valid_hours))
    slices.written = []
    slices._watch = SimpleNamespace(write=slices.written.append)
    slices._patience, slices._refusals = Patience(poll=10.0, backoff=300.0), 0
    slices._let_go = lambda reason, state: None
    return slices


def asked(hours_ago, **facts):
    return {"asked": time.time() - 3600 * hours_ago} | facts


@pytest.mark.parametrize(
    "made, hours, gives_up",
    [
        ([asked(1.5)], 2.0, False),
        ([asked(2.1), asked(0.1)], 2.0, True),  # since the first one that is waited for
        ([asked(9.0, active=1.0), asked(1.5)], 2.0, False),  # since the last slice
        ([asked(9.0), asked(8.0, active=1.0)], 2.0, False),
        ([asked(99.0)], 0.0, False),  # without a limit
    ],
)
def test_a_slice_is_waited_for_as_long_as_the_user_wants(made, hours, gives_up):
    slices = supervisor(*made, valid_hours=hours)
    assert slices._has_waited(STATE) is gives_up
    if gives_up:
        (state,) = slices.written
        assert state["status"] == "failed" and "no slice within 2 h" in state["error"]
    else:
        assert slices.written == []


def test_a_job_without_quota_anywhere_fails_unless_it_had_a_slice():
    """Once all of its offers were refused; each is tried."""
    slices = supervisor(asked(0.1))
    slices._count_refusal("no quota in a", STATE)
    assert slices._facts["offer"] == 1 and slices.written == []
    slices._count_refusal("no quota in b", STATE)
    assert slices._facts["offer"] == 0
    assert slices.written[0]["error"].startswith("--on: no quota in b; ask for quota there")
    for patient in (supervisor(asked(2.0, active=1.0), asked(0.1)), supervisor(gke="cluster")):
        for _ in range(9):
            patient._count_refusal("no quota", STATE)
        assert patient.written == []


def test_hosts_that_never_speak_end_the_job_after_as_many_slices_as_may_fail():
    slices = supervisor(asked(0.1), failures=3)
    for count in (1, 2):
        slices._bad_start(STATE, "pip failed")
        assert slices._facts["bad_slices"] == count and slices.written == []
    slices._bad_start(STATE, "pip failed")
    assert slices.written[0]["error"] == "3 slices in a row did no step, the last: pip failed"


def test_requests_that_fail_are_made_less_and_less_often(monkeypatch):
    """At once after the first failure, then twice as late each time, up to the longest pause."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    slices, pauses = supervisor(), []
    for _ in range(8):
        slices._lost("preempted", STATE)
        pauses.append(slices._next - 1000.0)
    assert pauses == [0, 20, 40, 80, 160, 300, 300, 300]
