"""Far: what a supervisor has done on a host, over one connection of ssh.

    supervisor --{"do": "tend", ...}--> ssh HOST python -m lmwright.cloud.ssh.far
               <--@lmwright {...}------

Requests and answers are JSON lines on standard input and output, so that no secret is on a command
line. Agents run in sessions of their own and live on when the connection ends.
"""

import base64
import hashlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import lmwright
from lmwright.cloud import local
from lmwright.cloud.spec import (
    FOLDERS,
    OVER,
    Spec,
    dump_spec,
    jobs_folder,
    load_spec,
    parse_spec,
    read_state,
    remove_job,
    save_spec,
    write_state,
)
from lmwright.errors import UserError
from lmwright.guard.files import write_whole

MARK = "@lmwright "  # what a login script prints is no answer
FACTS = "ssh.json"
MOST_BYTES = 1_000_000  # of a file in one answer
PATIENCE_S = 5.0
TICK_S = 0.1
TRY_S = 5.0

Answer = dict[str, Any]


def code_digest() -> str:
    """Digest of the package's code, which must be the same on all hosts."""
    package = Path(lmwright.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def hello(name: str) -> Answer:
    """Facts of this host; `machine` tells it from others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = [socket.gethostname(), boot.read_text() if boot.exists() else "", str(jobs_folder())]
    return {
        "version": lmwright.__version__,
        "code": code_digest(),
        "python": platform.python_version(),
        "machine": machine,
        "taken": (jobs_folder() / name).exists(),
    }


def mark(folder: str, token: str) -> Answer:
    """Leaves a file in a folder, for other hosts to find; tells which folders it made."""
    path, made = Path(folder), []
    for parent in (*reversed(path.parents), path):
        if not parent.exists():
            parent.mkdir()
            made.append(str(parent))
    (path / f".lmwright-{token}").write_text(token)
    return {"made": made}


def unmark(folder: str, token: str, made: list[str]) -> Answer:
    """Removes what `mark` made."""
    Path(folder, f".lmwright-{token}").unlink(missing_ok=True)
    for parent in reversed(made):
        with suppress(OSError):
            os.rmdir(parent)
    return {}


def marked(folder: str, token: str) -> Answer:
    """Looks for the file that another host left."""
    end = time.monotonic() + PATIENCE_S  # network file systems need a moment
    path = Path(folder, f".lmwright-{token}")
    while not (seen := path.exists()) and time.monotonic() < end:
        time.sleep(TICK_S)
    return {"seen": seen}


def store(folder: str) -> Answer:
    """Digest of the manifests of prepared data, or of its first portion; empty where there are
    none."""
    below = ("*/manifest.json", "portion-000/*/manifest.json")
    manifests = sorted(path for names in below for path in Path(folder).glob(names))
    data = b"".join(path.read_bytes() for path in manifests)
    return {"digest": hashlib.sha256(data).hexdigest() if manifests else ""}


def exists(path: str) -> Answer:
    """Looks for a path."""
    return {"there": os.path.exists(path)}


_ears: list[socket.socket] = []


def listen(address: str, token: str) -> Answer:
    """Listens on a free port until `deaf`. Returns the port and this host's own addresses."""
    ear = socket.create_server((address, 0))
    _ears.append(ear)

    def greet() -> None:
        with suppress(OSError):
            while True:
                caller, _ = ear.accept()
                with caller:
                    caller.sendall(token.encode())

    threading.Thread(target=greet, daemon=True).start()
    own_addresses = {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }
    addresses = [address] if address else sorted(own_addresses)
    return {"port": ear.getsockname()[1], "addresses": addresses}


def deaf() -> Answer:
    """Ends listening."""
    while _ears:
        ear = _ears.pop()
        with suppress(OSError):
            ear.shutdown(socket.SHUT_RDWR)
        ear.close()
    return {}


def call(addresses: list[str], port: int, token: str) -> Answer:
    """Addresses under which the listening host answers. Others may have the same address, such as
    that of a bridge, so that the token is compared."""
    reached = []
    for address in addresses:
        with suppress(OSError), socket.create_connection((address, port), TRY_S) as caller:
            if caller.makefile("rb").read(len(token)) == token.encode():
                reached.append(address)
    return {"addresses": reached}


def place(job: str, files: dict[str, str]) -> Answer:
    """Makes the job's folder and the files that are not there. Raises UserError where another job
    has its name."""
    spec = parse_spec(job.encode())
    try:
        save_spec(spec, files)
    except UserError:
        if not spec.folder.exists() or not _complete(spec):
            raise
    for name, text in files.items():
        if not (spec.folder / name).exists():
            write_whole(spec.folder / name, text, mode=0o600)
    return {}


def _complete(spec: Spec) -> bool:
    """True if the folder is this job's: made before, or just now by a host with the same home."""
    path = spec.folder / "job.json"
    end = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(TICK_S)
    if not path.exists():  # an interrupted launch
        for name in FOLDERS:
            (spec.folder / name).mkdir(exist_ok=True)
        write_whole(path, dump_spec(spec), mode=0o600)
    return parse_spec(path.read_bytes()).token == spec.token


def tend(name: str, host: int, keep: bool, stop: bool, at: dict[str, int]) -> Answer:
    """Keeps the host's agent alive, and tells what is new in its files since `at`."""
    spec = load_spec(name)
    if stop:
        (spec.folder / "stop").touch()
    with local.locked(spec.folder / f"agent-{host}.lock"):
        state = read_state(spec)
        if keep and state["status"] not in OVER:
            local.keep_agent(spec, host)
    local.reap()
    answer = {"pid": _living(spec, host), "state": state}
    if supervised_here(spec):
        return answer | {"same_folder": True}
    paths = [spec.folder / "logs" / f"{kind}-{host}.log" for kind in ("host", "agent")]
    paths += [spec.folder / "events.log"] if host == 0 else []
    paths += spec.folder.glob(f"stacks/host-{host}.*")
    news = {}
    for path in paths:
        place = path.relative_to(spec.folder).as_posix()
        if (tail := _tail(path, at.get(place, 0))) is not None:
            news[place] = tail
    return answer | {"news": news}


def _living(spec: Spec, host: int) -> int | None:
    """Process number of the agent, unless it is frozen."""
    process = local.agent(spec, host)
    with suppress(psutil.NoSuchProcess):
        if process is not None and process.status() != psutil.STATUS_STOPPED:
            return process.pid
    return None


def supervised_here(spec: Spec) -> bool:
    """True if the job's folder is that of its supervisor, as with one home for all machines."""
    try:
        return "hosts" in json.loads((spec.folder / FACTS).read_bytes())
    except (OSError, ValueError):
        return False


def _tail(path: Path, at: int) -> list[Any] | None:
    """(position at which the new part of a file begins, that part); None if there is nothing
    new."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        at = at if at <= size else 0
        file.seek(at)
        if data := file.read(MOST_BYTES):
            return [at, base64.b64encode(data).decode()]
    return None


def restart(name: str) -> Answer:
    """Lets a job that has ended begin again."""
    spec = load_spec(name)
    (spec.folder / "stop").unlink(missing_ok=True)
    write_state(spec, read_state(spec) | {"status": "starting", "failures": 0, "error": ""})
    return {}


def end(name: str, host: int, patience_s: float) -> Answer:
    """Ends the host's agent, if it does not end by itself."""
    spec = load_spec(name)
    until = time.monotonic() + patience_s
    while local.agent(spec, host) is not None and time.monotonic() < until:
        time.sleep(TICK_S)
        local.reap()
    local.end_agent(spec, host)
    return {}


def forget(name: str) -> Answer:
    """Removes the job's folder."""
    with suppress(FileNotFoundError):
        remove_job(load_spec(name))
    return {}


DEEDS: dict[str, Callable[..., Answer]] = {
    "hello": hello,
    "mark": mark,
    "unmark": unmark,
    "marked": marked,
    "store": store,
    "exists": exists,
    "listen": listen,
    "deaf": deaf,
    "call": call,
    "place": place,
    "tend": tend,
    "restart": restart,
    "end": end,
    "forget": forget,
}


def main() -> None:
    """Answers requests until the connection ends."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = DEEDS[request.pop("do")](**request)
        except UserError as error:
            answer = {"error": str(error)}
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            answer = {"error": f"{place}{error.strerror or error}"}
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
