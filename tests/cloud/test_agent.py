"""An agent, and how it is ended from beside."""

import asyncio

import pytest

from lmwright.cloud import agent as following
from lmwright.cloud.agent import Agent
from lmwright.cloud.spec import Spec


@pytest.mark.parametrize("turns", range(5))
def test_an_agent_ends_when_cancelled_also_together_with_a_line(turns, monkeypatch):
    monkeypatch.setattr(following, "AGAIN_S", 0.01)

    async def scene():
        async def accept(reader, writer):
            await reader.read()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        spec = Spec(name="j", dir="", command=(), hosts=1, port=port)
        agent = Agent(spec, 0)
        heard = asyncio.StreamReader()
        connected = asyncio.Event()

        async def connect(address, port):
            _, writer = await opened(address, port)
            connected.set()
            return heard, writer

        opened = asyncio.open_connection
        monkeypatch.setattr(asyncio, "open_connection", connect)
        running = asyncio.create_task(agent.run())
        await connected.wait()
        await asyncio.sleep(0.05)
        heard.feed_data(b'{"order": "alive"}\n')
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        _, still = await asyncio.wait([running], timeout=1)
        agent._over = True
        heard.feed_eof()
        server.close()
        return not still

    assert asyncio.run(scene())
