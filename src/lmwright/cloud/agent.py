"""Agent: one on each host; starts and ends the host's rank as the leader says.

    leader --start, term, dump, kill, over, alive--> agent --signals--> rank
    leader <--hello, pulse, ended, notice---- agent

Messages are JSON lines on one TCP connection. A connection that closes, or on which nothing is
heard for long, means that the other end is gone: the agent then kills its rank, since a rank whose
peers are gone hangs, and waits for the leader to come back.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from lmwright.cloud.leader import EXIT_USER_ERROR, Leader
from lmwright.cloud.rank import Rank
from lmwright.cloud.spec import Spec, load_spec

PULSE_S = 0.5
AGAIN_S = 0.5
DUMP_S = 1.0


class Agent:
    """The agent of one host."""

    def __init__(
        self,
        spec: Spec,
        host: int,
        leave: Callable[[], Awaitable[None]] | None = None,
        *,
        leaves: bool = False,
    ):
        """Agent of a host; before it leaves an ended job, `leave` is awaited. With `leaves`, it
        also goes once it is told to end by a signal and its rank has saved, as a pod should."""
        self._spec, self._host, self._leave = spec, host, leave
        self._leaves, self._leaving = leaves, False
        self.left = False
        """True after it went before the end of the job."""
        self._rank: Rank | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._over = False

    async def run(self) -> None:
        """Follows the leader until the job is over."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_end)
        while not self._over:
            try:
                reader, self._writer = await asyncio.open_connection(
                    self._spec.address, self._spec.port
                )
            except OSError:
                await asyncio.sleep(AGAIN_S)
                continue
            pulse = asyncio.create_task(self._pulse())
            try:
                self._send({"hello": self._host, "token": self._spec.token, "pid": os.getpid()})
                while line := await asyncio.wait_for(reader.readline(), self._spec.limits.silent_s):
                    await self._obey(json.loads(line))
            except (OSError, ValueError, TimeoutError):
                pass
            finally:
                pulse.cancel()
                self._writer.close()
                self._writer = None
                self._signal(signal.SIGKILL)
            await asyncio.sleep(AGAIN_S)

    async def _obey(self, order: dict[str, Any]) -> None:
        match order["order"]:
            case "start":
                self._signal(signal.SIGKILL)
                await self._start(
                    Rank(self._spec, self._host, order["attempt"], order["coordinator"])
                )
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

    def _told_to_end(self) -> None:
        self.notice()
        if self._leaves:
            self._leaving = True
            if self._rank is None:
                self._go()

    def _go(self) -> None:
        self._over = self.left = True
        if self._writer is not None:
            self._writer.close()

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
        if self._rank is rank:
            self._rank = None
        self._send({"ended": facts})
        if self._leaving:
            self._go()

    async def _pulse(self) -> None:
        while True:
            facts = {"attempt": self._rank.attempt, **self._rank.look()} if self._rank else {}
            self._send({"pulse": facts})
            await asyncio.sleep(PULSE_S)

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            with suppress(OSError, RuntimeError):
                self._writer.write(json.dumps(message).encode() + b"\n")

    def _signal(self, number: int) -> None:
        if self._rank is not None:
            self._rank.signal(number)

    def notice(self, reason: str = "this host was told to end") -> None:
        """The machine is about to go: the leader lets all ranks save."""
        self._send({"notice": reason})


async def serve(name: str, host: int) -> None:
    """Runs the agent of a host, on host 0 with the leader."""
    spec = load_spec(name)
    if host:
        await Agent(spec, host).run()
        return
    leader = Leader(spec)
    server = await asyncio.start_server(leader.accept, spec.address, spec.port)
    async with server:
        await asyncio.gather(leader.run(), Agent(spec, host).run())


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
