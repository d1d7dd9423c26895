"""Jobs at Kaggle whose sessions, answers, uploads or supervisors are lost."""

import asyncio
import os
import random
import signal
import sys
import time
from dataclasses import replace

import pytest

from lmwright.cloud import jobs
from lmwright.cloud.jobs import follow
from lmwright.cloud.kaggle import job, service, session
from lmwright.cloud.kaggle.job import kernels_of
from lmwright.cloud.kaggle.session import Attempts
from lmwright.cloud.rank import Rank
from lmwright.cloud.spec import Spec, job_names, load_spec, read_state, save_spec
from lmwright.errors import UserError
from lmwright.storage import kaggle_client
from tests.cloud.kaggle.service import end, launched
from tests.storage.test_silent_servers import Silent

pytestmark = pytest.mark.usefixtures("small_wheel")


def test_another_supervisor_takes_over(fake, run, tmp_path):
    spec = launched(replace(run, dir=str(tmp_path / "out")))
    again = load_spec(spec.name)
    job.look(again, service.Kaggle())
    assert read_state(again)["service"] == "QUEUED"
    assert follow(load_spec(spec.name)) == 0


def test_lost_sessions_are_tried_again_and_given_up(fake, run):
    def play(fake, session):
        session.state, session.message = "ERROR", "the machine went away"

    fake.play = play
    spec = launched(run)
    assert follow(spec) == 1
    state = read_state(spec)
    assert state["attempt"] == job.FAILURES and "went away" in state["error"]


def test_sessions_that_save_nothing_are_given_up(fake, run):
    why = "lmwright: error: its last 10 minutes stay free"
    fake.play = lambda fake, session: end(session, 43, 0, saved=0, error=why)
    spec = launched(run)
    assert follow(spec) == 1
    told = "session 3 saved nothing new: its last 10 minutes stay free"
    assert read_state(spec)["error"] == told  # not after the first


def test_an_unreachable_service_is_asked_again(fake, run, monkeypatch):
    spec = launched(run)
    fake.refusals["GetKernelSessionStatus"] = 503, "busy"
    job.look(spec, service.Kaggle())
    assert "cannot be asked" in (spec.folder / "events.log").read_text()
    del fake.refusals["GetKernelSessionStatus"]
    assert follow(spec) == 0


def test_an_upload_that_fails_leaves_nothing(fake, run):
    fake.refusals["upload"] = 400, ""
    with pytest.raises(UserError, match=r"its file did not arrive; launch again later"):
        launched(run)
    assert not fake.datasets and not job_names()
    del fake.refusals["upload"]
    assert follow(launched(run)) == 0


def test_an_upload_that_later_clients_call_unsuccessful(fake, run, monkeypatch):
    from kaggle.api.kaggle_api_extended import KaggleApi

    def fails(*_, **__):
        raise ValueError("Upload unsuccessful: wheel.whl")

    monkeypatch.setattr(KaggleApi, "dataset_create_new", fails)
    with pytest.raises(UserError, match=r"its file did not arrive; launch again later"):
        launched(run)
    assert not fake.datasets and not job_names()


def test_an_upload_that_nobody_answers_ends(fake, run, monkeypatch, capsys):
    monkeypatch.setattr(kaggle_client, "ANSWER_S", 0.2)
    with Silent() as server:
        nobody = {"token": "blob", "createUrl": f"http://{server.address}/upload/blob"}
        fake.StartBlobUpload = lambda q: nobody
        began = time.monotonic()
        with pytest.raises(
            UserError, match=r"did not arrive, since nobody .*; launch again later"
        ) as told:
            launched(run)
        assert "\n" not in str(told.value) and "timed out" not in capsys.readouterr().out
        assert time.monotonic() - began < 60 and len(server.held) == kaggle_client.UPLOAD_TRIES
    assert not fake.datasets and not job_names()


def test_a_launch_whose_answer_is_lost_is_found_the_next_time(fake, run):
    fake.lost.append("SaveKernel")
    with pytest.raises(UserError, match="launch again later"):
        launched(run)
    assert not job_names()
    with pytest.raises(UserError, match=r"lmwright-cats-a is queued at Kaggle already"):
        launched(run)


def test_a_session_whose_answer_is_lost_is_taken_for_what_it_is(fake, run):
    def play(fake, session):
        end(session, *((43, 2) if session.settings["session"] == 1 else (0, 4)))
        fake.lost.append("SaveKernel")

    fake.play = play
    spec = launched(run)
    assert follow(spec) == 0
    assert [len(sessions) for sessions in fake.sessions.values()] == [1, 1]


@pytest.mark.slow
def test_sessions_end_in_every_way(fake, run, tmp_path):
    """The next session always begins with the newest that was saved, and nothing is lost."""
    rng, best = random.Random(), {"step": 0, "archive": ""}

    def play(fake, session):
        told = session.settings
        source = next((name for name, to in told["archives"].items() if to == "run"), "")
        assert source == best["archive"]
        deed = rng.choice(["saved", "saved", "saved", "lost", "canceled", "unreachable"])
        if deed == "saved":
            best["step"] = step = best["step"] + rng.randint(1, 3)
            best["archive"] = f"run-{told['job']}-{told['session']}.lmw"
            end(session, rng.choice([42, 43]) if step < 8 else 0, step)
        elif deed == "unreachable":
            fake.lost += ["GetKernelSessionStatus", "ListKernelSessionOutput"]
            session.log = ""
        else:
            session.state = {"lost": "ERROR", "canceled": "CANCEL_ACKNOWLEDGED"}[deed]

    fake.play = play
    for seed in range(8):
        rng.seed(seed)
        best |= {"step": 0, "archive": ""}
        spec = launched(replace(run, dir=str(tmp_path / f"out{seed}")), name=f"cats-{seed}")
        while follow(spec):
            jobs.start_command(spec.name, detach=True)
        state = read_state(spec)
        assert (state["status"], state["saved"]) == ("done", best["step"])
        assert (tmp_path / f"out{seed}" / "checkpoints" / str(best["step"])).is_dir()


class Killed(BaseException):
    """The supervisor is gone."""


@pytest.mark.slow
def test_a_supervisor_that_is_killed_anywhere(fake, run, tmp_path, monkeypatch):
    """Another one goes on: no session is begun twice, and the run comes home."""
    fake.play = lambda fake, s: end(s, *((43, 2) if s.settings["session"] == 1 else (0, 4)))
    calls, deadly = [0], [0]

    def deadly_call(name):
        method = getattr(service.Kaggle, name)

        def call(self, *words):
            calls[0] += 1
            before, after = calls[0] == deadly[0], calls[0] == -deadly[0]
            if before:
                raise Killed
            answer = method(self, *words)
            if after:
                raise Killed
            return answer

        monkeypatch.setattr(service.Kaggle, name, call)

    for name in ("quota", "push", "session", "fetch"):
        deadly_call(name)
    spec = launched(replace(run, dir=str(tmp_path / "out")), name="cats")
    begun = calls[0]
    assert follow(spec) == 0
    total = calls[0]
    for number in range(begun + 1, total + 1):
        for side in (1, -1):
            name = f"cats-{number}-{'ab'[side < 0]}"
            calls[0], deadly[0] = 0, 0
            spec = launched(replace(run, dir=str(tmp_path / name)), name=name)
            deadly[0] = side * number
            with pytest.raises(Killed):
                follow(spec)
            deadly[0] = 0
            assert follow(load_spec(name)) == 0
            assert [len(fake.sessions[f"acme/lmwright-{name}-{x}"]) for x in "ab"] == [1, 1]
            assert (tmp_path / name / "checkpoints" / "4").is_dir()


def test_a_session_that_is_told_to_end_while_its_rank_starts_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = (sys.executable, "-c", "import time; time.sleep(60)")
    spec = Spec(name="k", dir=str(tmp_path / "run"), command=words, hosts=1, port=0)
    save_spec(spec)
    start = Rank.start

    async def told_meanwhile(rank):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        await start(rank)

    monkeypatch.setattr(Rank, "start", told_meanwhile)

    async def scene():
        async with asyncio.timeout(20):
            return await Attempts(spec, time.time() + 3600).run()

    assert asyncio.run(scene())["code"] == -signal.SIGTERM


def test_an_attempt_that_fails_when_the_session_is_nearly_over_ends_no_job(tmp_path, monkeypatch):
    """`train` refuses a session that is no longer than its margin, as a mistake of the user."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(session, "PAUSE_S", 0.1)
    (tmp_path / "run" / "checkpoints" / "7").mkdir(parents=True)
    words = (sys.executable, "-c", "import sys, time; time.sleep(1); sys.exit(1)")
    spec = Spec(name="k", dir=str(tmp_path / "run"), command=words, hosts=1, port=0)
    save_spec(spec)
    attempts = Attempts(spec, time.time() + 601.5, 600.0)
    outcome = asyncio.run(attempts.run())
    assert outcome["code"] == 43 and outcome["saved"] == 7


def test_no_two_jobs_have_the_same_kernels():
    slugify = pytest.importorskip("slugify").slugify  # the client asks that of a title
    long = "a-very-long-name-of-a-run-that-is-launched"
    names = ["cats", "a.b", "a-b", "a_b", "a..b", f"{long}-1", f"{long}-2"]
    kernels = [kernel for name in names for kernel in kernels_of("acme", name)]
    assert len(set(kernels)) == 2 * len(names)
    slugs = [kernel.removeprefix("acme/") for kernel in kernels]
    assert all(len(slug) <= 50 and slugify(slug) == slug for slug in slugs)
    assert kernels[0] == "acme/lmwright-cats-a"
