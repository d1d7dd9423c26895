"""The leader's decisions, told to agents that the tests play over real connections."""

import asyncio
import json
from dataclasses import replace

import pytest

from lmwright.cloud import leader as leading
from lmwright.cloud.rank import Pulse
from lmwright.cloud.spec import Limits, read_state
from lmwright.cloud.stragglers import Stragglers
from tests.cloud.played_agents import LIMITS, played, quick_spec, started


@pytest.fixture
def spec(tmp_path, monkeypatch):
    return quick_spec(tmp_path, monkeypatch)


def test_all_ranks_start_together_and_a_finished_job_is_over(spec):
    async def scene(connect, running):
        first = await connect(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.order(), 0.2)  # the other host is not there
        second = await connect(1)
        assert [(await a.order())["order"] for a in (first, second)] == ["start", "start"]
        first.end(1, 0, step=7, saved=7)
        second.end(1, 0, step=7, saved=7)
        assert (await first.order())["order"] == "over"
        await running

    state = played(spec, scene)
    assert (state["status"], state["step"], state["saved"]) == ("done", 7, 7)


def test_an_agent_that_comes_back_after_the_end_is_told(spec):
    async def scene(connect, running):
        first, second = await started(connect)
        second.writer.close()
        first.end(1, 2, "lmwright: error: no")
        assert [(await first.order())["order"] for _ in range(2)] == ["kill", "over"]
        second = await connect(1)
        assert (await second.order())["order"] == "over"
        await running

    assert played(spec, scene)["status"] == "failed"


def test_a_death_ends_all_and_the_first_error_is_told(spec):
    async def scene(connect, running):
        agents = await started(connect)
        agents[1].end(1, 1, "the disk broke")
        assert [(await a.order())["order"] for a in agents] == ["kill", "kill"]
        agents[0].end(1, -9)
        orders = [await a.order() for a in agents]
        assert [o["attempt"] for o in orders] == [2, 2]

    state = played(spec, scene)
    assert state["failures"] == 1
    assert state["error"] == "rank 1 ended with exit code 1: the disk broke"


@pytest.mark.parametrize("code", [2, 44])
def test_what_a_new_start_cannot_cure_fails_the_job(spec, code):
    async def scene(connect, running):
        agents = await started(connect)
        agents[0].end(1, code, "lmwright: error: model.dim: no such field")
        agents[1].end(1, -9)
        await running

    state = played(spec, scene)
    assert state["status"] == "failed"
    assert "no such field" in state["error"]


def test_ranks_that_saved_after_a_notice_start_again_without_a_failure(spec):
    async def scene(connect, running):
        agents = await started(connect)
        agents[1].say(notice="")
        assert [(await a.order())["order"] for a in agents] == ["term", "term"]
        for agent in agents:
            agent.end(1, 42, saved=5)
        agents[1].say(pulse={}, notice="")  # it stays after all
        assert [(await a.order())["attempt"] for a in agents] == [2, 2]

    state = played(spec, scene)
    assert (state["failures"], state["saved"]) == (0, 5)


def test_a_rank_that_does_not_end_with_the_others_is_killed(spec):
    async def scene(connect, running):
        agents = await started(connect)
        agents[0].end(1, 42)
        assert [(await agents[1].order())["order"] for _ in range(2)] == ["dump", "kill"]
        agents[1].end(1, -9)
        assert (await agents[0].order())["order"] == "dump"

    played(spec, scene)
    events = (spec.folder / "events.log").read_text()
    assert "the ranks on hosts 1 did not end within 1 s" in events


@pytest.mark.parametrize("hangs", [False, True])
def test_a_rank_that_fails_or_hangs_while_saving_after_a_notice_ends_all_at_once(spec, hangs):
    async def scene(connect, running):
        agents = await started(connect)
        agents[1].say(notice="")
        assert (await agents[0].order())["order"] == "term"
        pulse = {"attempt": 1, "phase": "save", "step": 3, "saved": 0, "hangs": True}
        if hangs:
            agents[1].say(pulse=pulse)
        else:
            agents[1].end(1, 48, "the disk is full")
        orders = [(await agents[0].order())["order"] for _ in range(1 + hangs)]
        assert orders == ["dump", "kill"][1 - hangs :]

    quick = replace(spec, limits=replace(LIMITS, grace_s=60.0))
    played(quick, scene)


def test_a_leader_waits_until_the_agents_have_left(spec, monkeypatch):
    monkeypatch.setattr(leading, "LEAVE_S", 10.0)

    async def scene(connect, running):
        agents = await started(connect)
        for agent in agents:
            agent.end(1, 0)
        assert (await agents[0].order())["order"] == "over"
        agents[0].writer.close()
        with pytest.raises(TimeoutError):  # host 1 still sends its output
            await asyncio.wait_for(asyncio.shield(running), 0.3)
        agents[1].writer.close()
        await asyncio.wait_for(running, 3)

    played(spec, scene)


def test_a_hang_is_dumped_and_killed(spec):
    async def scene(connect, running):
        agents = await started(connect)
        pulse = {"attempt": 1, "phase": "step", "step": 3, "saved": 0}
        agents[0].say(pulse={**pulse, "hangs": False})
        agents[1].say(pulse={**pulse, "hangs": True})
        assert [(await agents[0].order())["order"] for _ in range(2)] == ["dump", "kill"]
        agents[0].end(1, -9)
        agents[1].end(1, -9)
        assert (await agents[0].order())["attempt"] == 2

    assert "hosts 1 (step 3)" in played(spec, scene)["error"]


@pytest.mark.parametrize("silent", [False, True])
def test_a_lost_host_ends_the_others_and_is_waited_for(spec, silent):
    async def scene(connect, running):
        agents = await started(connect)
        if not silent:
            agents[1].writer.close()
        while (order := await asyncio.wait_for(agents[0].reader.readline(), 5)) != b"":
            agents[0].say(pulse={})
            if json.loads(order)["order"] == "kill":
                break
        agents[0].end(1, -9)
        back = await connect(1)
        assert (await agents[0].order())["attempt"] == 2
        assert (await back.order())["attempt"] == 2

    quick = replace(spec, limits=replace(LIMITS, silent_s=2.0))
    assert played(quick, scene)["error"].startswith("host 1 is lost")


def test_failures_without_a_new_checkpoint_are_counted(spec):
    async def scene(connect, running):
        agents = await started(connect)
        for attempt, saved in enumerate([0, 5, 5, 5], 1):
            agents[0].end(attempt, 1, f"broken {attempt}", saved=saved)
            agents[1].end(attempt, -9)
            if attempt < 4:
                orders = [(await agents[0].order())["order"] for _ in range(2)]
                assert orders[-1] == "start", orders
        await running

    state = played(spec, scene)
    assert state["status"] == "failed"
    assert state["error"].startswith("3 failures in a row") and "broken 4" in state["error"]


def test_stop_lets_the_ranks_save(spec):
    async def scene(connect, running):
        agents = await started(connect)
        (spec.folder / "stop").touch()
        assert (await agents[0].order())["order"] == "term"
        for agent in agents:
            agent.end(1, 42, saved=9)
        await running

    assert played(spec, scene)["status"] == "stopped"


def test_a_stranger_is_turned_away(spec):
    async def scene(connect, running):
        stranger = await connect(0, token="guess")
        assert (await stranger.order())["order"] == "closed"

    assert played(spec, scene)["attempt"] == 0


def test_a_new_leader_goes_on_counting(spec):
    async def scene(connect, running):
        await started(connect)

    async def again(connect, running):
        agents = [await connect(0), await connect(1)]
        assert (await agents[0].order())["attempt"] == 2

    played(spec, scene)
    played(spec, again)


def test_limits_follow_the_phase_and_the_measured_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("lmwright.cloud.rank.time.monotonic", lambda: now[0])
    pulse = Pulse(Limits(step_floor_s=10, compile_s=100))
    pulse.see({"beat": 1, "phase": "compile", "step": 0, "saved": 0})
    assert pulse.limit_s == 100
    for beat in range(2, 10):
        now[0] += 8.0
        pulse.see({"beat": beat, "phase": "step", "step": beat, "saved": 0})
    assert pulse.limit_s == 40  # five times the median step
    now[0] += 39
    assert not pulse.hangs()
    now[0] += 2
    assert pulse.hangs()
    pulse.see(None)  # an unreadable heartbeat is no sign of life
    assert pulse.hangs()


def test_starting_has_as_long_as_before(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("lmwright.cloud.rank.time.monotonic", lambda: now[0])
    limits = Limits(step_floor_s=10, start_s=360)
    first = Pulse(limits)
    assert first.limit_s == 360
    first.see({"beat": 1, "phase": "start", "step": 0, "saved": 0})
    now[0] += 20
    first.see({"beat": 2, "phase": "restore", "step": 0, "saved": 0})
    assert first.start_s == 20
    assert Pulse(limits, usual_s=first.start_s).limit_s == 60
    assert Pulse(limits, usual_s=1).limit_s == 10
    assert Pulse(limits, usual_s=200).limit_s == 360


def test_a_first_step_and_a_checkpoint_are_soon_known(spec, monkeypatch):
    """To `jobs show`, also where the launch is killed at that moment."""
    monkeypatch.setattr(leading, "WRITE_EVERY_S", 60.0)
    monkeypatch.setattr(leading, "TELL_EVERY_S", 0.05)

    async def known(step, saved):
        for _ in range(100):
            state = read_state(spec)
            if (state["step"], state["saved"]) == (step, saved):
                return True
            await asyncio.sleep(0.02)
        return False

    async def scene(connect, running):
        agents = await started(connect)
        pulse = {"beat": 1, "phase": "step", "attempt": 1}
        agents[0].say(pulse=pulse | {"step": 1, "saved": 0})
        assert await known(1, 0)
        agents[0].say(pulse=pulse | {"beat": 2, "step": 9, "saved": 8})
        assert await known(9, 8)

    played(spec, scene)


def test_a_slow_host_is_named_once(spec):
    async def scene(connect, running):
        agents = await started(connect)
        for step in range(1, 20):
            for host, agent in enumerate(agents):
                pulse = {"attempt": 1, "phase": "step", "step": step, "saved": 0}
                agent.say(pulse={**pulse, "host_ms": 400 if host else 100})
        await asyncio.sleep(0.2)

    def ordinary(slow):
        watch = Stragglers()
        for step in range(20):
            for host in range(4):
                work = slow if host == 2 else 10 + step % 3
                watch.see(host, {"phase": "step", "step": step, "host_ms": work})
        return watch.news(), watch.news(), [host for host, _, _ in watch.slow()]

    assert ordinary(55) == (None, None, [])  # too little to matter
    first, second, hosts = ordinary(500)
    assert first.startswith("slow hosts: host 2: 500 ms") and second is None and hosts == [2]
    played(spec, scene)
    assert "slow hosts: host 1: 400 ms" in (spec.folder / "events.log").read_text()
