"""Local: the hosts of a job are processes of this machine.

    --on local:4x2    four hosts with two devices each, on the CPU

The agents run in sessions of their own: killing the supervisor changes nothing for the job, and
another one takes over with `lmwright jobs follow NAME`.
"""

import fcntl
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from lmwright.cloud.spec import OVER, Spec, read_state
from lmwright.errors import StorageError, UserError
from lmwright.guard.files import try_lock, write_whole
from lmwright.guard.processes import began_at, start_of
from lmwright.storage.mirror import LOCK as RUN_LOCK

TARGET = re.compile(r"local:(\d+)(?:x(\d+))?")
TICK_S = 0.5
KILL_S = 10.0
LOCK = ".agents.lock"
MOST = 64  # hosts, and devices of each


def parse(target: str) -> tuple[int, int]:
    """Number of hosts, and of devices of each. Raises UserError."""
    match = TARGET.fullmatch(target)
    hosts, devices = (int(n or 1) for n in match.groups()) if match else (0, 0)
    if not (1 <= hosts <= MOST and 1 <= devices <= MOST):
        raise UserError(
            f"--on: {target!r} is not a local target; write local:HOSTSxDEVICES, as in local:4x2"
        )
    return hosts, devices


def variables(devices: int) -> dict[str, str]:
    """Environment in which a rank sees that many CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    count = f"--xla_force_host_platform_device_count={devices}"
    other_flags = [f for f in flags.split() if not f.startswith(count.partition("=")[0])]
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*other_flags, count])}


def free_port() -> int:
    """A port for the leader."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def refuse_trained(run_dir: str) -> None:
    """Raises UserError for a run directory of this machine that a process trains, whose job would
    fail at once."""
    with suppress(OSError), open(Path(run_dir, RUN_LOCK), "rb") as lock:
        if not try_lock(lock):
            raise UserError(
                f"dir: {run_dir} is being trained by another process; wait for it or choose dir="
            )


def supervise(spec: Spec, *, once: bool = False) -> None:
    """Keeps an agent running for each host until the job is over; with `once`, starts those that
    are missing and returns."""
    while read_state(spec)["status"] not in OVER:
        for host in range(spec.hosts):
            keep_agent(spec, host)
        if once:
            return
        time.sleep(TICK_S)
        reap()


def keep_agent(spec: Spec, host: int) -> None:
    """Starts a host's agent on this machine, unless it is alive and not frozen. Several supervisors
    may look at once, but two agents of a host would take its place from each other for ever."""
    with locked(spec.folder / LOCK):
        _keep_agent(spec, host)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one process of this machine in at a time, by a lock on a file that only this user may
    open."""
    with open(path, "ab", opener=partial(os.open, mode=0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _keep_agent(spec: Spec, host: int) -> None:
    process = agent(spec, host)
    if process is not None and process.status() == psutil.STATUS_STOPPED:
        process.kill()
        process.wait(KILL_S)
        process = None
    if process is None:
        _start(spec, host)


def end_agents(spec: Spec) -> None:
    """Kills the agents of a job, and with them its ranks."""
    for host in range(spec.hosts):
        end_agent(spec, host)


def end_agent(spec: Spec, host: int) -> None:
    """Kills a host's agent, its rank and what that has started."""
    process = agent(spec, host)
    if process is None:
        return
    with suppress(psutil.NoSuchProcess):
        below = process.children(recursive=True)
        process.kill()
        for child in below:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _start(spec: Spec, host: int) -> None:
    """Starts an agent, which notes its number before its program begins. Until then it has the lock
    of the one who started it, who may be killed at any time."""
    file = _pid_file(spec, host)

    def note() -> None:
        write_whole(file, f"{os.getpid()} {start_of(os.getpid())}")

    with open(spec.folder / "logs" / f"agent-{host}.log", "ab") as log:
        try:
            subprocess.Popen(
                [sys.executable, "-m", "lmwright.cloud.agent", spec.name, str(host)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=note,
            )
        except subprocess.SubprocessError as error:  # says nothing of what `note` raised
            raise StorageError(
                f"{file}: cannot be written; free some space, or make the folder writable"
            ) from error


def agent(spec: Spec, host: int) -> psutil.Process | None:
    """The living agent of a host."""
    try:
        pid, start = _pid_file(spec, host).read_text().split()
        process = psutil.Process(int(pid))
        same = began_at(int(pid), float(start))
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None


def _pid_file(spec: Spec, host: int) -> Path:
    return spec.folder / f"agent-{host}.pid"


def reap() -> None:
    """Forgets children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return
