"""Agent: one on each host; starts and ends the host's rank as the leader says.

    leader --start, term, dump, kill, over, alive--> agent --signals--> rank
    leader <--hello, pulse, ended, notice---- agent

Messages are JSON lines on one TCP connection. A connection that closes, or on which nothing is
heard for long, means that the other end is gone: the agent then kills its rank, since a rank whose
peers are gone hangs, and waits for the leader to come back.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from lmwright.cloud.handshake import introduce
from lmwright.cloud.leader import Leader
from lmwright.cloud.rank import Rank
from lmwright.cloud.spec import Spec, load_spec
from lmwright.errors import EXIT_USER_ERROR

PULSE_S = 0.5
AGAIN_S = 0.5
DUMP_S = 1.0


class Agent:
    """The agent of one host."""

    def __init__(self, spec: Spec, host: int, leave: Callable[[], Awaitable[None]] | None = None):
        """Agent of a host; before it leaves an ended job, `leave` is awaited."""
        self._spec, self._host, self._leave = spec, host, leave
        self._rank: Rank | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._over = self._leaving = False
        self.told_to_end = False
        self._notice = ""
        self._usual_s = 0.0
        """The longest that a rank has taken to start; 0 before one has."""

    async def run(self) -> None:
        """Follows the leader until the job is over."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_end)
        while not (self._over or self._leaving):
            try:
                reader, writer = await asyncio.open_connection(self._spec.address, self._spec.port)
            except OSError:
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                await self._follow(reader, writer)
            except (OSError, ValueError, TypeError, KeyError, TimeoutError):
                pass  # also where another program listens there
            finally:
                writer.close()
                self._writer = None
                self._signal(signal.SIGKILL)
            if self._watcher is not None:
                await self._watcher  # a rank that does not die keeps the host's devices
            await asyncio.sleep(AGAIN_S)

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._spec.limits.silent_s):
            await introduce(reader, writer, self._spec.token, self._host)
        self._writer = writer
        pulse = asyncio.create_task(self._pulse())
        try:
            while not self._leaving and (line := await self._next_line(reader)):
                await self._obey(json.loads(line))
        finally:
            pulse.cancel()

    async def _next_line(self, reader: asyncio.StreamReader) -> bytes:
        """Next line of the leader. `asyncio.wait_for` of Python 3.11 may lose a cancellation that
        comes together with a line; `asyncio.timeout` does not."""
        async with asyncio.timeout(self._spec.limits.silent_s):
            return await reader.readline()

    async def _obey(self, order: dict[str, Any]) -> None:
        match order["order"]:
            case "start":
                self._signal(signal.SIGKILL)
                if self._watcher is not None:
                    await self._watcher
                where = order["attempt"], order["coordinator"]
                await self._start(Rank(self._spec, self._host, *where, self._usual_s))
            case "term":
                self._signal(signal.SIGTERM)
            case "dump":
                self._signal(signal.SIGUSR1)
                await asyncio.sleep(DUMP_S)
            case "kill":
                self._signal(signal.SIGKILL)
            case "over":
                self._over = True
                self._signal(signal.SIGKILL)
                if self._leave is not None:
                    await self._leave()
                if self._writer is not None:
                    self._writer.close()  # the leader waits for it

    async def _start(self, rank: Rank) -> None:
        try:
            await rank.start()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | PermissionError)
            code = EXIT_USER_ERROR if missing else 1  # another attempt cures no missing program
            reason = f"{error.filename}: {error.strerror}"
            self._send({"ended": {"attempt": rank.attempt, "code": code, "error": reason}})
            return
        self._rank = rank
        self._watcher = asyncio.create_task(self._watch(rank))

    async def _watch(self, rank: Rank) -> None:
        code = await rank.wait()
        rank.signal(signal.SIGKILL)  # what it left running
        rank.look()
        with suppress(OSError):  # the disk is full, say
            rank.keep_stacks()
        facts = {"attempt": rank.attempt, "code": code, "error": rank.error(code)}
        facts |= rank.pulse.facts
        rank.clean()
        if self._usual_s and rank.pulse.hangs():  # it may not have hung: the next has longer
            rank.pulse.start_s = rank.pulse.start_s or rank.pulse.limit_s
        self._usual_s = max(self._usual_s, rank.pulse.start_s)
        if self._rank is rank:
            self._rank = None
        self._send({"ended": facts})
        if self.told_to_end:
            self._go()

    async def _pulse(self) -> None:
        while True:
            facts = {"attempt": self._rank.attempt, **self._rank.look()} if self._rank else {}
            self._send({"pulse": facts, "notice": self._notice})
            await asyncio.sleep(PULSE_S)

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            with suppress(OSError, RuntimeError):
                self._writer.write(json.dumps(message).encode() + b"\n")

    def _signal(self, number: int) -> None:
        if self._rank is not None:
            self._rank.signal(number)

    def notice(self, reason: str) -> None:
        """Tells the leader why the machine is about to go, or that it is not (""). The leader lets
        all ranks save, and starts none before the host is gone or stays. It is told for as long as
        it holds, since the leader may not be there yet."""
        if reason and reason != self._notice:
            self._send({"notice": reason})
        self._notice = reason

    def _told_to_end(self) -> None:
        """Handles a signal that tells the agent to end. The agent ends once its rank has."""
        self.told_to_end = True
        self.notice("its agent is told to end")
        if self._rank is None:
            self._go()

    def _go(self) -> None:
        self._leaving = True
        if self._writer is not None:
            self._writer.close()


async def serve(name: str, host: int) -> None:
    """Runs the agent of a host, on host 0 with the leader."""
    spec = load_spec(name)
    if host:
        await Agent(spec, host).run()
        return
    await lead(spec, Agent(spec, host))


async def lead(spec: Spec, agent: Agent) -> None:
    """Runs the agent of host 0, and the leader. If that agent is told to end, so is the leader,
    once no rank runs; the next one goes on by state.json."""
    leader = Leader(spec)
    server = await asyncio.start_server(leader.accept, spec.address, spec.port)
    leading, following = asyncio.create_task(leader.run()), asyncio.create_task(agent.run())
    try:
        await asyncio.wait((leading, following), return_when=asyncio.FIRST_COMPLETED)
        if leading.done():
            leading.result()  # an agent without a leader would wait for ever
        await following
        if agent.told_to_end:
            end = time.monotonic() + spec.limits.grace_s
            while not (leader.idle or leading.done()) and time.monotonic() < end:
                await asyncio.sleep(AGAIN_S)
            leading.cancel()
        with suppress(asyncio.CancelledError):
            await leading
    finally:
        leading.cancel()
        following.cancel()
        await asyncio.gather(leading, following, return_exceptions=True)
        server.close()  # and no waiting for agents that do not close their end


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
