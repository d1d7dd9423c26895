"""Faults at random, under a job of several processes: what is lost, and how long each takes.

    python benchmarks/drill.py [--faults 20] [--hosts 4] [--devices 1] [--seed 0] [--bucket]

    launch --on local:HOSTSxDEVICES --agents--> ranks that train
                                       ^           ^
    enemy: kill, stop, term, agent, leader, supervisor, clock, full disk, NaN, bucket

The same run is trained once without faults, but with NaN in the same steps. Afterwards the drill
compares the loss of every step and every array of the last checkpoint, bit for bit, and looks that
no committed checkpoint was lost. It prints a table of the faults and one of the goals, and ends
with 1 if anything differs or nothing moved for 60 s; the other times depend on what else the
machine does. With `--bucket` the run directories are in a storage server on loopback (of the
tests), whose requests fail at times.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from drill_results import WATCHDOG_S, compare, tell, tell_goals
from drill_run import PATCHES, prepare

HANG_S = 60.0
POLL_S = 0.05
JUMPS_S = (-7200.0, -90.0, 90.0, 7200.0)
BUCKET_S = DISK_S = 5.0  # for which requests fail, and no file grows
FULL = 4096  # bytes; a heartbeat is shorter
KINDS = ("kill", "kill", "stop", "term", "agent", "stop agent", "notice", "supervisor", "clock")
KINDS += ("disk",)
RESTARTING = {"kill", "stop", "term", "agent", "stop agent", "notice"}


class Job:
    """A launched job, and what can be done to it."""

    def __init__(self, root: Path, hosts: int, devices: int, proxy: Any = None):
        self.root, self.hosts, self.proxy = root, hosts, proxy
        self.folder = root / "state" / "lmwright" / "jobs" / "drill"
        (root / "jump").mkdir()
        (root / "jump" / "sitecustomize.py").write_text(PATCHES)
        (root / "clock").write_text("0")
        paths = [str(root / "jump"), *sys.path]
        self.variables = {
            **os.environ,
            "XDG_STATE_HOME": str(root / "state"),
            "XDG_CACHE_HOME": str(root / "cache"),
            "DRILL_CLOCK": str(root / "clock"),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        self._launch = ["launch", str(root / "faults.toml"), "--on", f"local:{hosts}x{devices}"]
        self._launch += ["--name", "drill", "--hang-after", str(WATCHDOG_S), "--failures", "1000"]
        self.supervisor: subprocess.Popen | None = None

    def lmwright(self, *words: str) -> subprocess.Popen:
        with open(self.root / "output.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "lmwright", *words],
                env=self.variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def supervise(self) -> None:
        """Launches, or takes over from a supervisor that was killed."""
        words = ["jobs", "follow", "drill"] if self.folder.exists() else self._launch
        self.supervisor = self.lmwright(*words)

    def state(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "state.json").read_text())
        except (OSError, ValueError):
            return {"status": "starting", "attempt": 0, "step": 0, "saved": 0}

    def beats(self) -> dict[int, dict[str, Any]]:
        """Heartbeats of the newest attempt, by host."""
        beats: dict[int, dict[str, Any]] = {}
        for path in (self.folder / "beats").glob("host-*"):
            if match := re.fullmatch(r"host-(\d+)\.(\d+)", path.name):
                host, attempt = map(int, match.groups())
                try:
                    beat = json.loads(path.read_text()) | {"attempt": attempt}
                except (OSError, ValueError):
                    continue
                if attempt >= beats.get(host, beat)["attempt"]:
                    beats[host] = beat
        return beats

    def agent(self, host: int) -> psutil.Process | None:
        try:
            return psutil.Process(int((self.folder / f"agent-{host}.pid").read_text().split()[0]))
        except (OSError, ValueError, psutil.NoSuchProcess):
            return None

    def rank(self, host: int) -> psutil.Process | None:
        agent = self.agent(host)
        try:
            return next(iter(agent.children()), None) if agent else None
        except psutil.NoSuchProcess:
            return None

    def events(self) -> list[tuple[float, str]]:
        try:
            lines = (self.folder / "events.log").read_text().splitlines()
        except OSError:
            return []
        stamped = (re.fullmatch(r"(\S+ \S+) (.*)", line) for line in lines)
        return [
            (datetime.fromisoformat(found[1]).timestamp(), found[2]) for found in stamped if found
        ]


def strike(job: Job, kind: str, rng: random.Random) -> str | None:
    """Does one fault; returns what was done, or None where there was nothing to do it to."""
    host = rng.randrange(job.hosts)
    if kind == "clock":
        jump = rng.choice(JUMPS_S)
        (job.root / "clock").write_text(str(jump))
        return f"clock {jump:+g} s"
    if kind == "bucket":
        _break_bucket(job.proxy, rng)
        return kind
    if kind == "supervisor":
        job.supervisor.kill()
        job.supervisor.wait()
        job.supervise()
        return kind
    if kind == "disk":
        return _fill_disk(job, host)
    process = job.agent(host) if kind in ("agent", "stop agent", "notice") else job.rank(host)
    if process is None:
        return None
    number = {"stop": signal.SIGSTOP, "stop agent": signal.SIGSTOP}.get(kind, signal.SIGKILL)
    number = {"term": signal.SIGTERM, "notice": signal.SIGTERM}.get(kind, number)
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return None
    return f"{kind} {host}"


def _fill_disk(job: Job, host: int) -> str | None:
    """For a while no file can grow that this host's processes write."""
    agent = job.agent(host)

    def limit(most: int) -> None:
        with suppress(psutil.NoSuchProcess):
            for process in (agent, *agent.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.rlimit(psutil.RLIMIT_FSIZE, (most, psutil.RLIM_INFINITY))

    if agent is None:
        return None
    limit(FULL)
    threading.Timer(DISK_S, limit, (psutil.RLIM_INFINITY,)).start()
    return f"disk {host}"


def _break_bucket(proxy: Any, rng: random.Random) -> None:
    """Lets half of all requests fail for a while, each in its way."""
    faults = type(proxy.faults)
    proxy.faults = faults(share=0.5, seed=rng.random())

    def mend() -> None:
        proxy.faults = faults()

    threading.Timer(BUCKET_S, mend).start()


class Watch:
    """Follows a job: what it has saved, and for how long nothing moved."""

    def __init__(self, job: Job):
        self.job, self.saved, self.longest, self.lost = job, 0, 0.0, 0
        self._before: Any = None
        self._moved = time.monotonic()

    def look(self) -> dict[int, dict[str, Any]]:
        beats, state = self.job.beats(), self.job.state()
        moved = {host: (b["attempt"], b["beat"]) for host, b in beats.items()}, state["attempt"]
        now = time.monotonic()
        if moved != self._before or state["status"] in ("done", "failed", "stopped"):
            self._before, self._moved = moved, now
        self.longest = max(self.longest, now - self._moved)
        self.lost += state["saved"] < self.saved
        self.saved = max(self.saved, state["saved"])
        return beats

    def over(self) -> bool:
        return self.job.state()["status"] in ("done", "failed", "stopped")


def drill(
    job: Job, faults: int, kinds: Sequence[str], rng: random.Random
) -> tuple[list[dict[str, Any]], Watch]:
    """Strikes that many times while the job trains; returns a row for each."""
    job.supervise()
    watch, rows = Watch(job), []
    while len(rows) < faults and not watch.over():
        _choose_moment(job, watch, rng)
        kind, attempt = rng.choice(kinds), job.state()["attempt"]
        phases = {beat["phase"] for beat in job.beats().values()} or {"none"}
        began, clock = time.time(), time.monotonic()
        done = strike(job, kind, rng)
        if done is None:
            continue
        row = {"kind": kind, "fault": done, "phase": "/".join(sorted(phases))}
        if kind in RESTARTING:
            row["saved"], row["back"] = _wait_for_step(watch, attempt, clock)
            told = [at for at, text in job.events() if at >= began and "attempt" in text]
            row["seen"] = told[0] - began if told else None
        rows.append(row)
        print(f"{len(rows):4d} {row}", flush=True)
        (job.root / "clock").write_text("0")
    while not watch.over() and watch.longest < HANG_S:
        watch.look()
        time.sleep(POLL_S)
    if watch.over():
        job.supervisor.wait(30)
    return rows, watch


def _choose_moment(job: Job, watch: Watch, rng: random.Random) -> None:
    """Waits for a moment to strike: any time, a save, or a few steps on."""
    choice, end = rng.random(), time.monotonic() + 30
    if choice < 0.3:
        end = time.monotonic() + rng.uniform(0, 6)
        while time.monotonic() < end:
            watch.look()
            time.sleep(POLL_S)
        return
    wanted = "save" if choice < 0.5 else "step"
    while time.monotonic() < end and not watch.over():
        if any(beat["phase"] == wanted for beat in watch.look().values()):
            time.sleep(rng.uniform(0, 0.5))
            return
        time.sleep(POLL_S / 5)


def _wait_for_step(watch: Watch, attempt: int, began: float) -> tuple[float | None, float | None]:
    """Seconds until this attempt has saved and ends, and until a later one has done a step."""
    saved = None
    while not watch.over() and watch.longest < HANG_S:
        beats = watch.look().values()
        now = time.monotonic() - began
        if saved is None and any((b["attempt"], b["phase"]) == (attempt, "end") for b in beats):
            saved = now
        if any(b["attempt"] > attempt and b["phase"] in ("step", "end") for b in beats):
            return saved, now
        time.sleep(POLL_S)
    return saved, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of the run; default: 25 for each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--bucket", action="store_true", help="run directories in a bucket")
    parser.add_argument(
        "--kinds", nargs="+", choices=sorted({*KINDS, "bucket"}), help="default: all"
    )
    args = parser.parse_args()
    if not args.bucket:
        return run(args, None)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.storage.fake_gcs import served

    with served() as proxy:
        return run(args, proxy)


def run(args: argparse.Namespace, proxy: Any) -> int:
    """Trains without faults and with them, and compares; returns the exit code."""
    root = (args.folder or Path(tempfile.mkdtemp(prefix="drill-"))).absolute()
    root.mkdir(parents=True, exist_ok=True)
    runs = str(root) if proxy is None else f"gs://bkt/drill-{uuid.uuid4().hex[:8]}"
    steps = prepare(root, runs, args)
    job = Job(root, args.hosts, args.devices, proxy)
    if job.lmwright("prepare", str(root / "calm.toml")).wait():
        print(f"prepare failed; see {root}/output.log")
        return 1
    rng = random.Random(args.seed)
    spoiled = sorted(rng.sample(range(1, steps), k=args.faults // 10))
    job.variables["DRILL_SPOILED"] = " ".join(map(str, [0, *spoiled]))
    calm = ["launch", str(root / "calm.toml"), "--on", f"local:{args.hosts}x{args.devices}"]
    began = time.monotonic()
    if job.lmwright(*calm, "--name", "calm").wait():
        print(f"the run without faults failed; see {root}/output.log")
        return 1
    calm_s = time.monotonic() - began
    print(f"{steps} steps without faults: {calm_s:.0f} s, starting included", flush=True)
    loads = [os.getloadavg()[0]]
    job.variables["DRILL_SPOILED"] = " ".join(map(str, [args.hosts - 1, *spoiled]))
    kinds = KINDS if proxy is None else (*KINDS, "bucket", "bucket")
    began = time.monotonic()
    rows, watch = drill(job, args.faults, args.kinds or kinds, rng)
    (root / "rows.json").write_text(json.dumps(rows, indent=1))
    status = job.state()["status"]
    if status != "done":
        print(f"the job ended as {status}; see {root}/output.log")
        return 1
    problems = compare(runs, steps, spoiled)
    tell(rows, watch, calm_s / (time.monotonic() - began), problems)
    tell_goals(rows, watch.longest)
    loads.append(os.getloadavg()[0])
    print(f"{os.cpu_count()} cores, load average {loads[0]:.1f} before and {loads[1]:.1f} after")
    return int(bool(problems) or watch.lost > 0 or watch.longest > HANG_S)


if __name__ == "__main__":
    sys.exit(main())
