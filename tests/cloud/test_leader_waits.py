"""What the leader waits for, and for how long: hosts, notices, saves, ranks that were killed."""

import asyncio
from dataclasses import replace

import pytest

from lmwright.cloud import leader as leading
from lmwright.cloud.spec import Cloud
from tests.cloud.played_agents import LIMITS, played, quick_spec, started


@pytest.fixture
def spec(tmp_path, monkeypatch):
    return quick_spec(tmp_path, monkeypatch)


def events(spec):
    return (spec.folder / "events.log").read_text()


async def until(agents, order, **pulse):
    """Lets agents beat until the first of them is told so; what it was told before."""
    before = []

    async def beat():
        while True:
            for agent in agents:
                agent.say(pulse=pulse)
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(beat())
    try:
        while (told := await agents[0].order())["order"] != order:
            before.append(told["order"])
        return before
    finally:
        beating.cancel()


def test_an_agent_that_comes_back_before_its_old_connection_broke(spec):
    async def scene(connect, running):
        agents = await started(connect)
        again = await connect(1)  # it has killed its rank
        assert (await agents[0].order())["order"] == "kill"
        agents[0].end(1, -9)
        assert (await agents[0].order())["attempt"] == 2
        assert (await again.order())["order"] == "start"

    assert played(spec, scene)["error"].startswith("host 1 is lost: its agent has come a second")


def test_a_killed_rank_that_does_not_end_does_not_hold_up_the_job(spec, monkeypatch):
    monkeypatch.setattr(leading, "KILLED_S", 0.3)

    async def scene(connect, running):
        agents = await started(connect)
        agents[0].end(1, 1, "broken")
        assert (await agents[1].order())["order"] == "kill"
        assert (await agents[1].order())["order"] == "closed"  # it comes back without a rank
        again = await connect(1)
        assert await until([agents[0]], "start") == ["kill"]
        assert (await again.order())["attempt"] == 2

    assert played(spec, scene)["attempt"] == 2


@pytest.mark.parametrize("cloud", [None, Cloud(project="p")])
def test_a_host_that_never_comes(spec, cloud, monkeypatch):
    monkeypatch.setattr(leading, "TELL_MISSING_S", 0.1)
    spec = replace(spec, cloud=cloud, limits=replace(LIMITS, gather_s=0.5))

    async def scene(connect, running):
        first = await connect(0)
        if cloud is not None:  # it costs money
            assert (await first.order())["order"] == "over"
            return
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.order(), 1.0)

    state = played(spec, scene)
    assert "waiting for hosts 1" in events(spec)
    if cloud is not None:
        assert state["status"] == "failed"
        assert "hosts 1: unhealthy or missing" in state["error"]


def test_a_notice_holds_until_it_is_taken_back(spec):
    async def scene(connect, running):
        first = await connect(0)
        first.say(notice="preempted: TRUE")  # before all are there
        await asyncio.sleep(0.1)
        second = await connect(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.order(), 0.4)
        first.say(pulse={}, notice="")
        assert (await second.order())["order"] == (await first.order())["order"] == "start"
        second.say(pulse={}, notice="maintenance-event: TERMINATE")
        assert (await first.order())["order"] == "term"
        for agent in (first, second):
            agent.end(1, 42, saved=5)
        with pytest.raises(TimeoutError):  # the doomed host does not train again
            await asyncio.wait_for(first.order(), 0.4)

    state = played(spec, scene)
    assert (state["failures"], state["saved"]) == (0, 5)
    assert "host 1: maintenance-event: TERMINATE; all ranks save and end" in events(spec)


@pytest.mark.parametrize("asked", ["stop", "notice"])
@pytest.mark.parametrize("phase", ["save", "step", "compile"])
def test_a_save_after_a_stop_may_take_longer_than_the_grace(spec, asked, phase):
    spec = replace(spec, limits=replace(LIMITS, grace_s=0.3))
    pulse = {"attempt": 1, "step": 9, "saved": 0, "hangs": False}

    async def scene(connect, running):
        agents = await started(connect)
        if asked == "stop":
            (spec.folder / "stop").touch()
        else:
            agents[0].say(notice="preempted")
        assert (await agents[0].order())["order"] == "term"
        if phase == "compile":  # nothing is lost
            assert await until(agents, "kill", phase=phase, **pulse) == ["dump"]
            return
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(until(agents, "kill", phase=phase, **pulse), 1.0)
        for agent in agents:
            agent.end(1, 42, saved=9)
            await asyncio.sleep(0.1)  # the second is not killed for the first one's long save
        if asked == "stop":
            await running

    state = played(spec, scene)
    assert state["saved"] == 9 * (phase != "compile") and state["failures"] == 0


@pytest.mark.parametrize(("step", "beat"), [(0, 3), (5, 3), (6, 3), (5, 0)])
def test_ranks_that_have_nothing_to_save_are_not_waited_for(spec, step, beat):
    pulse = {"attempt": 1, "phase": "compile", "step": step, "saved": 5 * (step > 0), "beat": beat}

    async def scene(connect, running):
        agents = await started(connect)
        for agent in agents:
            agent.say(pulse=pulse)
        await asyncio.sleep(0.1)
        agents[0].say(notice="preempted")
        early = beat and step != 6  # a step that is not saved; a command that does not beat
        assert (await agents[0].order())["order"] == ("kill" if early else "term")
        if early:
            for agent in agents:
                agent.end(1, -9)
            await asyncio.sleep(0.2)

    state = played(spec, scene)
    assert (state["failures"], state["error"]) == (0, "")


def test_a_rank_that_steps_on_after_another_has_ended_is_killed(spec):
    async def scene(connect, running):
        agents = await started(connect)
        agents[1].end(1, 42)
        pulse = {"attempt": 1, "phase": "step", "step": 9, "saved": 0, "hangs": False}
        assert await until(agents[:1], "kill", **pulse) == ["dump"]

    played(spec, scene)


@pytest.mark.parametrize("first", [-9, 45, 48])
def test_what_ranks_say_once_another_is_lost_is_not_final(spec, first):
    async def scene(connect, running):
        agents = await started(connect)
        agents[1].end(1, first)
        assert (await agents[0].order())["order"] == "kill"
        agents[0].end(1, 2, "lmwright: error: the other processes were not found")
        assert (await agents[0].order())["attempt"] == 2

    state = played(spec, scene)
    assert (state["status"], state["failures"]) == ("running", 1)
