"""An agent, and how it is ended from beside."""

import asyncio
import hmac
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from unittest.mock import AsyncMock, Mock

import psutil
import pytest

from lmwright.cloud import agent as following
from lmwright.cloud import leader, local
from lmwright.cloud.agent import Agent
from lmwright.cloud.handshake import admit
from lmwright.cloud.spec import Spec, save_spec


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
        monkeypatch.setattr(following, "introduce", AsyncMock())
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


def spec_here(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    spec = Spec(name="j", dir="", command=("true",), hosts=1, port=local.free_port())
    save_spec(spec)
    return spec


def test_an_agent_does_not_outlive_a_leader_that_fails(monkeypatch, tmp_path):
    def no_port(_address):
        raise OSError(24, "Too many open files")

    spec = spec_here(monkeypatch, tmp_path)
    monkeypatch.setattr(leader, "_free_port", no_port)

    async def scene():
        async with asyncio.timeout(5):
            await following.lead(spec, Agent(spec, 0))

    with pytest.raises(OSError, match="Too many open files"):
        asyncio.run(scene())
    assert "Too many open files" in (spec.folder / "events.log").read_text()


def test_an_agent_that_is_told_to_end_while_it_connects_ends(monkeypatch, tmp_path):
    spec, opened = spec_here(monkeypatch, tmp_path), asyncio.open_connection

    async def scene():
        async def accept(reader, writer):
            while await reader.readline():
                writer.write(b'{"order": "alive"}\n')

        async def connect(address, port):
            agent._told_to_end()
            return await opened(address, port)

        server = await asyncio.start_server(accept, spec.address, spec.port)
        monkeypatch.setattr(asyncio, "open_connection", connect)
        agent = Agent(spec, 0)
        async with asyncio.timeout(5):
            await agent.run()
        server.close()

    asyncio.run(scene())


def test_an_agent_outlives_what_is_no_leader(monkeypatch, tmp_path):
    spec = spec_here(monkeypatch, tmp_path)
    monkeypatch.setattr(following, "AGAIN_S", 0.01)
    words = [b"7\n", b"[]\n", b"{}\n", b"HTTP/1.1 400\n", b'{"order": "over"}\n']
    words.append(b'{"nonce": "1", "proof": "2"}\n{"order": "over"}\n')
    heard, secret = [], spec.token.encode()

    async def scene():
        async def accept(reader, writer):
            if words:
                writer.write(words.pop(0))
                heard.append(await reader.read(1000))
                await writer.drain()
            else:
                await admit(reader, writer, spec.token)
                writer.write(b'{"order": "over"}\n')
            writer.close()

        server = await asyncio.start_server(accept, spec.address, spec.port)
        async with asyncio.timeout(5):
            await Agent(spec, 0).run()
        server.close()

    asyncio.run(scene())
    assert len(heard) == 6 and not any(secret in line or b"proof" in line for line in heard)


def test_a_proof_holds_for_one_connection_and_one_side():
    async def scene(*answers):
        """What an agent says, to a leader of a script."""
        reader, writer = asyncio.StreamReader(), Mock()
        for answer in answers:
            reader.feed_data(json.dumps(answer).encode() + b"\n")
        reader.feed_eof()
        with suppress(ConnectionError):
            await admit(reader, writer, "secret")
            return None
        return json.loads(writer.write.call_args.args[0])

    hello = {"hello": 0, "nonce": "n"}
    challenge = asyncio.run(scene(hello, {"proof": "guess"}))
    assert (
        challenge["proof"]
        == hmac.new(b"secret", f"leader 0 n {challenge['nonce']}".encode(), "sha256").hexdigest()
    )
    again = asyncio.run(scene(hello, {"proof": challenge["proof"]}))  # its own is no agent's
    assert again["nonce"] != challenge["nonce"] and again["proof"] != challenge["proof"]


def test_supervisors_that_look_at_once_start_one_agent(monkeypatch, tmp_path):
    spec, started = spec_here(monkeypatch, tmp_path), []

    def start(spec, host):
        started.append(host)
        time.sleep(0.2)
        began = psutil.Process().create_time()
        local._pid_file(spec, host).write_text(f"{os.getpid()} {began}")

    monkeypatch.setattr(local, "_start", start)
    supervisors = [threading.Thread(target=local.keep_agent, args=(spec, 0)) for _ in range(3)]
    for each in supervisors:
        each.start()
    for each in supervisors:
        each.join()
    assert started == [0]


def test_an_agent_is_known_after_the_clock_was_set(monkeypatch, tmp_path):
    spec = spec_here(monkeypatch, tmp_path)
    popen, children = subprocess.Popen, []

    def waiting(*_, **options):
        words, note = [sys.executable, "-c", "input()"], options["preexec_fn"]
        children.append(popen(words, stdin=subprocess.PIPE, preexec_fn=note))

    monkeypatch.setattr(local.subprocess, "Popen", waiting)
    local._start(spec, 0)
    (child,) = children
    at = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: at(process) + 3600)
    assert local.agent(spec, 0).pid == child.pid
    earlier = psutil.Process(child.pid).create_time()
    local._pid_file(spec, 0).write_text(f"{child.pid} {earlier}")  # as earlier versions noted it
    assert local.agent(spec, 0).pid == child.pid
    local._pid_file(spec, 0).write_text(f"{child.pid} 1.0")
    assert local.agent(spec, 0) is None
    child.communicate()
