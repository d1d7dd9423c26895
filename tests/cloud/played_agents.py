"""A real leader, and agents that a test plays over real connections."""

import asyncio
import json
from contextlib import asynccontextmanager

from lmwright.cloud import leader as leading
from lmwright.cloud.handshake import introduce
from lmwright.cloud.leader import Leader
from lmwright.cloud.spec import Limits, Spec, read_state, save_spec

LIMITS = Limits(failures=3, silent_s=60.0, grace_s=1.0, backoff_s=0.1)


class Agent:
    """An agent that does what the test says."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def say(self, **message):
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def order(self):
        """The next order that is no sign of life."""
        while True:
            async with asyncio.timeout(5):  # wait_for of Python 3.11 may lose a cancellation
                line = await self.reader.readline()
            order = json.loads(line or b'{"order": "closed"}')
            if order["order"] != "alive":
                return order

    def end(self, attempt, code, error="", **facts):
        self.say(ended={"attempt": attempt, "code": code, "error": error, **facts})


def quick_spec(tmp_path, monkeypatch):
    """A job of two hosts, whose leader ticks fast."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(leading, "TICK_S", 0.02)
    monkeypatch.setattr(leading, "TELL_EVERY_S", 0.05)
    monkeypatch.setattr(leading, "LEAVE_S", 0.3)
    spec = Spec(name="j", dir="run", command=("true",), hosts=2, port=0, limits=LIMITS)
    save_spec(spec)
    return spec


@asynccontextmanager
async def led(spec):
    """A leader, and a function that connects an agent."""
    leader = Leader(spec)
    server = await asyncio.start_server(leader.accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def connect(host, token=spec.token):
        agent = Agent(*await asyncio.open_connection("127.0.0.1", port))
        try:
            await introduce(agent.reader, agent.writer, token, host)
        except ConnectionError:  # it does not know the leader, and goes on
            agent.say(proof=token)
        return agent

    running = asyncio.create_task(leader.run())
    try:
        yield connect, running
    finally:
        running.cancel()
        server.close()


def played(spec, scene):
    """Runs `scene(connect, running)`."""

    async def play():
        async with led(spec) as (connect, running):
            await asyncio.wait_for(scene(connect, running), 60)

    asyncio.run(play())
    return read_state(spec)


async def started(connect):
    """Both agents, after their first order."""
    agents = [await connect(0), await connect(1)]
    orders = [await agent.order() for agent in agents]
    assert orders[0] == orders[1] and orders[0]["order"] == "start", orders
    assert orders[0]["attempt"] == 1
    return agents
