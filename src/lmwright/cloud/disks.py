"""Disks: mounts the data disks of a job read-only on a host.

Run as a module by the startup script, at every boot; what is mounted stays. $LMWRIGHT_DEVICES
stands for another folder than /dev/disk.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lmwright.cloud import metadata
from lmwright.cloud.book import fail_job
from lmwright.cloud.disk_names import disk_name, mount_root
from lmwright.cloud.spec import parse_spec
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket

MARK = ".lmwright-disk.json"
"""File on a disk that lmwright has filled: its name, and which store it holds."""
LABEL_LETTERS = 16  # of an ext4 file system
DEVICE_S = 120.0


def devices(name: str, number: int) -> Iterator[Path]:
    """Places where the device of a disk may be: by the name that it was attached with, by its file
    system's, or by its number (from 1), as the service names those of slices."""
    root = Path(os.environ.get("LMWRIGHT_DEVICES", "/dev/disk"))
    yield root / "by-id" / f"google-{name}"
    yield root / "by-label" / name[:LABEL_LETTERS]
    yield root / "by-id" / f"google-persistent-disk-{number}"


def find_device(name: str, number: int, within_s: float = DEVICE_S) -> Path:
    """The device of a disk. Raises UserError where none appears."""
    end = time.monotonic() + within_s
    while True:
        for path in devices(name, number):
            if path.exists():
                return path
        if time.monotonic() > end:
            raise UserError(f"disk {name}: its device is not there; check that it is attached")
        time.sleep(1.0)


def mount_disk(name: str, number: int, within_s: float = DEVICE_S) -> Path:
    """Mounts a disk read-only, unless it is; returns the folder. Raises UserError."""
    target = mount_root() / name
    if not is_mounted(target):
        device = find_device(name, number, within_s)
        target.mkdir(parents=True, exist_ok=True)
        try:
            run_tool("mount", "-o", "ro,noload", str(device), str(target))  # no journal is replayed
        except UserError:
            run_tool("mount", "-o", "ro", str(device), str(target))  # no ext4
    with suppress(OSError, ValueError):
        found = json.loads((target / MARK).read_bytes())["name"]
        if found != name:
            run_tool("umount", str(target))
            raise UserError(f"disk {name}: device {number} holds disk {found}; check --disk")
    return target


def is_mounted(target: Path) -> bool:
    """True if something is mounted there."""
    return subprocess.run(["mountpoint", "-q", str(target)]).returncode == 0


def run_tool(*words: str) -> str:
    """Output of a program of the system. Raises UserError with its last line."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise UserError(f"{words[0]} {words[-1]}: {lines[-1].strip()}")
    return done.stdout


def main(within_s: float = DEVICE_S) -> None:
    """Mounts the disks of this host's job. Where that fails, host 0 fails the job, since the same
    disks would fail on another slice."""
    url = metadata.attribute("lmwright-job")
    there = Bucket(url).read("job.json") if url else None
    if not url or there is None:
        return
    spec = parse_spec(there[0])
    for number, disk in enumerate(spec.cloud.disks if spec.cloud else (), 1):
        try:
            print(f"disk {disk}: mounted at {mount_disk(disk_name(disk), number, within_s)}")
        except UserError as error:
            print(f"lmwright: error: {error}", flush=True)
            _fail(Bucket(url), str(error))
            return


def _fail(bucket: Bucket, error: str) -> None:
    facts = metadata.tpu_env()
    if int(facts.get("WORKER_ID", 0)) or int(facts.get("MEGASCALE_SLICE_ID", 0)):
        return
    fail_job(bucket, error)


if __name__ == "__main__":
    try:
        main()
    except UserError as failure:
        raise SystemExit(f"lmwright: error: {failure}") from None
