"""Session: trains for as long as a session at Kaggle lasts, and packs what it leaves behind.

    run.toml, archives --> attempts of `lmwright train` --> run-JOB-N.lmw, session.json

An attempt that fails or hangs is followed by another from its newest checkpoint, as on every other
machine. Kaggle keeps the output of a session that ended by itself only, so that this one ends in
time, and with exit code 0 whenever there is something to keep.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tarfile
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmwright.cloud import local
from lmwright.cloud.leader import FINAL_CODES
from lmwright.cloud.rank import Rank
from lmwright.cloud.spec import Limits, Spec, save_spec
from lmwright.config.run import Limits as Time
from lmwright.guard.files import write_whole
from lmwright.storage.bucket import is_bucket
from lmwright.train.signals import EXIT_PREEMPTED, EXIT_SESSION_OVER

RESULT = "session.json"
ENDING = ".lmw"
"""Ending of archives; Kaggle unpacks those whose ending it knows."""
PACK_BYTES_PER_S = 2e8
PACK_S = 120.0
MOST_OUTPUT_BYTES = 19_000_000_000  # Kaggle keeps 20 GB
FINAL = (0, EXIT_SESSION_OVER, *FINAL_CODES)
TICK_S = 0.5
DUMP_S = 1.0
PAUSE_S = 5.0


def main(file: str) -> int:
    """Runs the session that a file describes; returns the exit code of the kernel."""
    facts = json.loads(Path(file).read_bytes())
    work, output = Path(facts["work"]), Path(facts["output"])
    os.environ.setdefault("XDG_STATE_HOME", str(work / "state"))
    output.mkdir(parents=True, exist_ok=True)
    _unpack(facts, work)
    directory = facts["dir"].replace(facts["placeholder"], str(work))
    text = facts["run"].replace(facts["placeholder"], str(work))
    (work / "run.toml").write_text(text, encoding="utf-8")
    deadline = facts["began"] + facts["seconds"] - PACK_S
    if not is_bucket(directory):
        deadline -= _size(Path(directory)) / PACK_BYTES_PER_S
    shutil.rmtree(work / "state", ignore_errors=True)
    spec = Spec(
        name=f"session-{facts['session']}",
        dir=directory,
        command=(sys.executable, "-m", "lmwright", "train", str(work / "run.toml")),
        hosts=1,
        port=local.free_port(),
        limits=Limits(**facts["limits"]),
    )
    save_spec(spec)
    margin = tomllib.loads(text).get("limits", {}).get("margin_minutes", Time().margin_minutes)
    outcome = asyncio.run(Attempts(spec, deadline, 60 * margin).run())
    outcome |= {"job": facts["job"], "session": facts["session"], "archive": ""}
    if not is_bucket(directory) and outcome["saved"]:
        outcome["archive"] = f"run-{facts['job']}-{facts['session']}{ENDING}"
        print(f"packing {directory}", flush=True)
        pack_run(Path(directory), output / outcome["archive"])
    for path in spec.folder.glob("stacks/*"):
        shutil.copy(path, output / f"stacks-{path.name}")
    write_whole(output / RESULT, json.dumps(outcome))
    print(f"session {facts['session']}: exit code {outcome['code']}, step {outcome['step']}")
    return 0 if outcome["code"] == 0 or outcome["saved"] else outcome["code"] or 1


class Attempts:
    """Attempts of one session, one after the other."""

    def __init__(self, spec: Spec, deadline: float, margin_s: float = 0.0):
        """Attempts until `deadline`; each leaves `margin_s` before it free."""
        self._spec, self._deadline, self._margin_s = spec, deadline, margin_s
        self._rank: Rank | None = None
        self._told = False

    async def run(self) -> dict[str, Any]:
        """Exit code, error, step and newest checkpoint of the last attempt."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._tell)
        failures, number, saved = 0, 0, newest_step(self._spec.dir)
        while True:
            if self._deadline - time.time() < self._margin_s + 1:  # `train` would refuse it
                error = (
                    f"its last {self._margin_s / 60:g} minutes stay free (limits.margin_minutes)"
                )
                return {"code": EXIT_SESSION_OVER, "error": error, "step": saved, "saved": saved}
            number += 1
            code, error, facts = await self._attempt(number)
            now = max(saved, facts["saved"])
            failures = 0 if now > saved else failures + 1
            saved = now
            if code in FINAL or self._told or failures >= self._spec.limits.failures:
                step = max(facts["step"], saved)
                return {"code": code, "error": error, "step": step, "saved": saved}
            if code != EXIT_PREEMPTED:
                print(f"attempt {number} ended with exit code {code}: {error}; trying again")
                await asyncio.sleep(PAUSE_S)

    async def _attempt(self, number: int) -> tuple[int, str, dict[str, Any]]:
        hours = max((self._deadline - time.time()) / 3600, 1e-3)
        command = (*self._spec.command, f"limits.session_hours={hours:.4f}")
        spec = replace(self._spec, command=command)
        rank = Rank(spec, 0, number, f"127.0.0.1:{local.free_port()}")
        log = spec.folder / "logs" / "host-0.log"
        at = log.stat().st_size if log.exists() else 0
        await rank.start()
        self._rank = rank
        if self._told:  # meanwhile
            rank.signal(signal.SIGTERM)
        ended = asyncio.ensure_future(rank.wait())
        hung = False
        while not (await asyncio.wait({ended}, timeout=TICK_S))[0]:
            at = _show(log, at)
            if rank.look()["hangs"] and not hung:
                hung = True
                print("no sign of life; the process is ended", flush=True)
                rank.signal(signal.SIGUSR1)
                await asyncio.sleep(DUMP_S)
                rank.signal(signal.SIGKILL)
        rank.signal(signal.SIGKILL)  # what it left running
        rank.keep_stacks()
        facts = rank.look()
        _show(log, at)
        error = "it hung" if hung else rank.error(ended.result())
        rank.clean()
        return ended.result(), error, facts

    def _tell(self) -> None:
        self._told = True
        if self._rank is not None:
            self._rank.signal(signal.SIGTERM)


def _unpack(facts: dict[str, Any], work: Path) -> None:
    for name, folder in facts["archives"].items():
        if (work / folder).exists():
            continue
        print(f"unpacking {name}", flush=True)
        unpack(Path(facts["files"][name]), work / folder)


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks an archive, whole or not at all."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(part, filter="data")
    os.replace(part, folder)


def pack_run(directory: Path, archive: Path) -> None:
    """Packs a run directory; of its checkpoints the newest, and as many others as may be kept."""
    checkpoints = sorted(
        (path for path in directory.glob("checkpoints/*") if path.name.isdecimal()),
        key=lambda path: -int(path.name),
    )
    room = MOST_OUTPUT_BYTES - sum(
        path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file() and "checkpoints" not in path.relative_to(directory).parts
    )
    left = set()
    for number, path in enumerate(checkpoints):
        room -= _size(path)
        if room < 0 and number:
            left.add(path.relative_to(directory).as_posix())

    def chosen(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if entry.name.removeprefix("./") in left else entry

    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w") as packed:
        packed.add(directory, ".", filter=chosen)
    os.replace(part, archive)


def newest_step(directory: str) -> int:
    """Step of the newest checkpoint of a run directory of this machine; 0 where there is none."""
    names = [path.name for path in Path(directory).glob("checkpoints/*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _show(log: Path, at: int) -> int:
    """Prints what is new in a log; returns how far it was read."""
    with open(log, "rb") as file:
        file.seek(at)
        data = file.read()
    sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()
    return at + len(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
