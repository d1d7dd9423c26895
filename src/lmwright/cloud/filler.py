"""Filler: what a helper VM does with a new disk: format, copy from a bucket, verify, report.

    gs://bucket/data --copy--> disk, mounted rw --verify--> disk, mounted ro again --> report

Files that are there with the right hash are not copied again, so that an interrupted VM goes on
where it was. What is verified was read from the disk, not from the memory of the copy.
"""

import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmwright.cloud import metadata
from lmwright.cloud.disk_names import mount_root
from lmwright.cloud.disks import LABEL_LETTERS, MARK, find_device, is_mounted, run_tool
from lmwright.data.manifest import MANIFEST, altered_error, hash_file
from lmwright.data.portions import PORTIONS
from lmwright.data.rows.store import verify_store
from lmwright.data.stored import Stored, read_stored
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket

THREADS = 16
REPORT_EVERY_S = 5.0
NOT_FORMATTED = 2  # exit code of blkid


@dataclass
class Report:
    """Progress and result of a filling, as an object of a bucket that the client reads."""

    bucket: Bucket
    name: str
    facts: dict[str, Any]
    done: int = 0
    told: float = float("-inf")
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, state: str, **facts: Any) -> None:
        """Writes the report."""
        self.facts |= {"state": state, "done_bytes": self.done, "time": time.time(), **facts}
        self.bucket.write(self.name, json.dumps(self.facts))

    def add(self, size: int) -> None:
        """Counts bytes that are on the disk."""
        with self.lock:
            self.done += size
            due = time.monotonic() - self.told > REPORT_EVERY_S
            if due:
                self.told = time.monotonic()
        if due:
            self.tell("copying")


def fill(source: str, name: str, report: Report) -> None:
    """Fills a disk with a store. Raises UserError where a file differs or a tool fails."""
    stored = read_stored(source)
    report.tell("copying", of_bytes=stored.size_bytes, store=stored.digest)
    target = mount_root() / name
    device = find_device(name, 1)
    target.mkdir(parents=True, exist_ok=True)
    if is_mounted(target):  # a boot ago it was, too
        run_tool("umount", str(target))
    _format(device, name)
    run_tool("mount", "-o", "rw,noatime", str(device), str(target))
    _copy(stored, target, report)
    mark = {"name": name, "store": stored.digest, "source": source}
    (target / MARK).write_text(json.dumps(mark) + "\n")
    run_tool("sync")
    run_tool("umount", str(target))
    report.tell("verifying")
    run_tool("mount", "-o", "ro", str(device), str(target))
    verify_store(target)
    run_tool("umount", str(target))
    report.tell("verified")


def _format(device: Path, name: str) -> None:
    """Makes a file system on an empty disk. Raises UserError for one that holds another."""
    words = ["blkid", "-o", "value", "-s", "TYPE", str(device)]
    found = subprocess.run(words, capture_output=True, text=True, errors="replace")
    kind = found.stdout.strip()
    if kind == "ext4":
        return
    if kind or found.returncode != NOT_FORMATTED:
        raise UserError(f"disk {name}: holds {kind or 'something'} already; nothing is written")
    eager = "lazy_itable_init=0,lazy_journal_init=0,discard"
    run_tool("mkfs.ext4", "-q", "-m", "0", "-L", name[:LABEL_LETTERS], "-E", eager, str(device))


def _copy(stored: Stored, target: Path, report: Report) -> None:
    bucket = Bucket(stored.url)

    def copy(key: str) -> None:
        wanted, path = stored.files[key], target / key
        there = path.exists() and path.stat().st_size == wanted["bytes"]
        if not there or hash_file(path) != wanted["xxh3_128"]:
            bucket.download(key, path)
            if hash_file(path) != wanted["xxh3_128"]:
                path.unlink()
                raise altered_error(f"{stored.url}/{key}", "its hash is not the manifest's")
        report.add(wanted["bytes"])

    pool = ThreadPoolExecutor(THREADS)
    try:
        list(pool.map(copy, sorted(stored.files)))
    finally:
        pool.shutdown(cancel_futures=True)
    for stage, raw in stored.manifests.items():  # last: they say that all is there
        path = target / stage / MANIFEST
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    if stored.portions:
        (target / PORTIONS).write_bytes(stored.portions)


def main() -> None:
    """Fills the disk that the metadata name; failures are reported, too."""
    facts = {name: metadata.attribute(f"lmwright-{name}") or "" for name in
             ("source", "disk", "disk-id", "report")}  # fmt: skip
    folder, _, object_name = facts["report"].rpartition("/")
    report = Report(Bucket(folder), object_name, {"disk_id": facts["disk-id"]})
    try:
        fill(facts["source"], facts["disk"], report)
    except (UserError, OSError) as error:
        text = str(error) if isinstance(error, UserError) else f"{error.filename}: {error.strerror}"
        print(f"lmwright: error: {text}", flush=True)
        report.tell("failed", error=text)


if __name__ == "__main__":
    main()
