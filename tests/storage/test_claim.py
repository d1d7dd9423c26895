"""Claims of a folder in a bucket: one owner at a time, and a dead one is not waited for."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from lmwright.errors import EXIT_TRANSIENT, UserError
from lmwright.storage import claim as module
from lmwright.storage.bucket import Bucket
from lmwright.storage.claim import CLAIM, Claim, Claimed


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    monkeypatch.setattr(module, "LEASE_S", 1.0)


def of_another_machine(url, **facts):
    """A claim that a process of another machine has written once."""
    told = {"owner": "ada", "host": "far", "machine": "other", "pid": 7, "token": "t", "beat": 1}
    Bucket(url).write(CLAIM, json.dumps(told | facts))


def test_a_living_owner_is_named_and_a_silent_one_is_replaced(url, quick):
    of_another_machine(url)
    with pytest.raises(Claimed, match=r"is being trained by ada on far \(process 7\)"):
        Claim(Bucket(url))
    time.sleep(1.5)
    Claim(Bucket(url)).close()
    assert Bucket(url).entry(CLAIM) is None


def test_beats_keep_a_claim_beyond_its_lease(url, quick):
    claim = Claim(Bucket(url))
    time.sleep(1.5)
    with pytest.raises(Claimed):
        Claim(Bucket(url))
    claim.check()
    claim.close()
    Claim(Bucket(url)).close()


def test_an_owner_that_slept_finds_out_and_leaves_the_claim_to_the_next(url, monkeypatch):
    monkeypatch.setattr(module, "LEASE_S", 0.2)
    slept = Claim(Bucket(url))  # its next beat is in ten seconds
    time.sleep(0.4)
    claim = Claim(Bucket(url))
    with pytest.raises(UserError, match="was taken over by"):
        slept.confirm()
    slept.close()
    claim.confirm()
    claim.close()


def test_an_owner_of_this_machine_is_known_after_the_clock_was_set(url, monkeypatch):
    claim, at = Claim(Bucket(url)), psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: at(process) + 3600)
    with pytest.raises(Claimed):
        Claim(Bucket(url))
    claim.close()


def test_a_process_of_this_machine_that_is_gone_is_not_waited_for(url):
    child = "import os, sys; from lmwright.storage.bucket import Bucket\n"
    child += "from lmwright.storage.claim import Claim; Claim(Bucket(sys.argv[1])); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", child, url]).returncode == 9
    assert Bucket(url).entry(CLAIM) is not None
    Claim(Bucket(url)).close()


def test_of_many_at_the_same_moment_one_gets_it(url):
    def take(_):
        try:
            return Claim(Bucket(url))
        except UserError:
            return None

    with ThreadPoolExecutor(8) as pool:
        taken = [claim for claim in pool.map(take, range(8)) if claim]
    assert len(taken) == 1
    taken[0].confirm()
    taken[0].close()


@pytest.mark.parametrize(("theirs", "ours", "taken"), [(1, 2, True), (2, 2, False), (3, 2, False)])
def test_the_next_attempt_of_a_job_takes_over_at_once(url, monkeypatch, theirs, ours, taken):
    of_another_machine(url, job="j", attempt=str(theirs))
    monkeypatch.setenv("LMWRIGHT_JOB", "j")
    monkeypatch.setenv("LMWRIGHT_ATTEMPT", str(ours))
    if taken:
        Claim(Bucket(url)).close()
    else:
        with pytest.raises(Claimed):
            Claim(Bucket(url))


def test_a_claim_that_cannot_be_read_is_one_of_somebody(url, quick):
    Bucket(url).write(CLAIM, "[[[")
    with pytest.raises(Claimed, match="somebody on another machine"):
        Claim(Bucket(url))


@pytest.mark.parametrize(("job", "code"), [("j", EXIT_TRANSIENT), ("other", 2)])
def test_a_claim_of_the_same_job_is_no_mistake_of_the_user(url, monkeypatch, job, code):
    """Of an attempt on a slice that is gone: its number may not have reached the bucket."""
    of_another_machine(url, job="j", attempt="3")
    monkeypatch.setenv(module.JOB, job)
    monkeypatch.setenv(module.ATTEMPT, "3")
    monkeypatch.setenv("LMWRIGHT_HEARTBEAT", "file")
    with pytest.raises(Claimed) as told:
        Claim(Bucket(url))
    assert told.value.exit_code == code
