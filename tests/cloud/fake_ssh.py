"""Machines behind ssh: servers on loopback that run what the real OpenSSH client asks for.

Each has a home and a state folder of its own. What it runs gets SIGHUP when its connection ends,
as a shell of sshd may.
"""

import asyncio
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import asyncssh
import psutil


async def copy(source, target) -> None:
    """Copies a stream to its end, or until the target is gone."""
    with suppress(OSError, asyncssh.Error):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()


class Machine:
    """One host: a server with a key, whose commands run in an environment of its own."""

    def __init__(self, name: str, folder: Path, authorized: str, variables: dict[str, str]):
        self.name, self.folder, self.commands = name, folder, []
        self.state = folder / "state"
        self.state.mkdir(parents=True)
        self.key = asyncssh.generate_private_key("ssh-ed25519")
        self._authorized = asyncssh.import_authorized_keys(authorized)
        self.variables = {
            "HOME": str(folder),
            "XDG_STATE_HOME": str(self.state),
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), "/usr/bin", "/bin"]),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **variables,
        }
        self.port = 0
        self._open: set[asyncssh.SSHServerConnection] = set()

    async def listen(self) -> None:
        machine = self

        class Server(asyncssh.SSHServer):
            def connection_made(self, conn):
                self.conn = conn
                machine._open.add(conn)

            def connection_lost(self, exc):
                machine._open.discard(self.conn)

            def connection_requested(self, *_):
                return True  # ports are forwarded, as sshd does

        self._server = await asyncssh.listen(
            "127.0.0.1",
            self.port,
            server_factory=Server,
            server_host_keys=[self.key],
            authorized_client_keys=self._authorized,
            process_factory=self._run,
            encoding=None,
        )
        self.port = self._server.get_port()

    async def leave(self) -> None:
        """The network is gone: no connection lives on, and none begins."""
        self._server.close()
        for connection in list(self._open):
            connection.abort()
        await self._server.wait_closed()

    async def _run(self, process: asyncssh.SSHServerProcess) -> None:
        self.commands.append(process.command)
        child = await asyncio.create_subprocess_shell(
            f"echo welcome to {self.name}; {process.command}",  # as login scripts do
            env=self.variables,
            cwd=self.folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        # Not by `redirect`, which ends the whole connection when a child is gone early.
        copies = [
            asyncio.create_task(self._type(process, child)),
            asyncio.create_task(copy(child.stdout, process.stdout)),
            asyncio.create_task(copy(child.stderr, process.stderr)),
        ]
        ended = asyncio.create_task(child.wait())
        closed = asyncio.create_task(process.channel.wait_closed())
        await asyncio.wait([ended, closed], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGHUP)
            await ended
        # What the child's own children still hold open is not waited for.
        await asyncio.wait(copies[1:], timeout=2)
        for task in copies:
            task.cancel()
        process.exit(max(ended.result(), 0))
        await process.wait_closed()

    async def _type(self, process: asyncssh.SSHServerProcess, child: asyncio.subprocess.Process):
        await copy(process.stdin, child.stdin)
        child.stdin.close()

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on this machine."""
        there = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("HOME") == str(self.folder):
                    there.append(process)
        return there

    def running(self, word: str = "") -> dict[psutil.Process, list[str]]:
        """Everything that runs on this machine with its command line, which holds `word`."""
        running = {}
        for process in self.processes():
            with suppress(psutil.Error):  # it may just have ended
                if not word or word in process.cmdline():
                    running[process] = process.cmdline()
        return running

    def jobs(self) -> list[str]:
        """Folders of jobs."""
        return sorted(path.name for path in self.state.glob("lmwright/jobs/*"))


class Network:
    """Several machines, and the configuration of the user's ssh."""

    def __init__(self, folder: Path, names: list[str], variables: dict[str, str]):
        self.folder = folder
        user = asyncssh.generate_private_key("ssh-ed25519")
        folder.mkdir()
        user.write_private_key(folder / "key")
        (folder / "key").chmod(0o600)
        authorized = user.export_public_key().decode()
        self.machines = {
            name: Machine(name, folder / name, authorized, variables) for name in names
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        for machine in self.machines.values():
            self._wait(machine.listen())
        self.write()

    def write(self) -> None:
        """Writes the configuration and the known keys."""
        known, hosts = [], []
        for name, machine in self.machines.items():
            public = machine.key.export_public_key().decode().strip()
            known.append(f"[127.0.0.1]:{machine.port} {public}")
            hosts.append(f"Host {name}\n  HostName 127.0.0.1\n  Port {machine.port}")
        same = (
            f"Host *\n  User me\n  IdentityFile {self.folder}/key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n"
        )
        (self.folder / "known").write_text("\n".join([*known, ""]))
        (self.folder / "config").write_text("\n".join([*hosts, same]))

    def cut(self, name: str) -> None:
        """A machine is not reached any more."""
        self._wait(self.machines[name].leave())

    def mend(self, name: str) -> None:
        """It is again."""
        self._wait(self.machines[name].listen())

    def close(self) -> None:
        """Ends all servers and what was left running."""
        for machine in self.machines.values():
            for process in machine.processes():
                with suppress(psutil.Error):
                    process.kill()
        for name in self.machines:
            with suppress(Exception):
                self.cut(name)
        self._wait(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(tasks, timeout=2) if tasks else None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wait(self, doing):
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(30)
