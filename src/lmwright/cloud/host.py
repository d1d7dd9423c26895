"""Host: the agent of a host of a slice, whose job lies in a bucket.

    metadata --job, worker--> agent --logs, stacks, state--> bucket
                                 ^-- stop, leader's address ---'

Host 0 says in the bucket where its leader listens. A new slice has another incarnation, so that
nobody talks to a leader that is gone.
"""

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmwright.cloud import metadata
from lmwright.cloud.agent import Agent, lead
from lmwright.cloud.pieces import LogSender
from lmwright.cloud.spec import OVER, RUN_FILE, Spec, parse_spec, read_state, save_spec
from lmwright.cloud.steps import receive_steps
from lmwright.cloud.vault import read_secrets
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket

LEADER = "leader.json"
POLL_S = 2.0
NOTICE_POLL_S = 2.0
PUSH_S = 5.0
PULLED = ("state.json", "events.log")
SEVERAL_SLICES = "MEGASCALE_"  # variables of the runtime by which slices find each other


class Carrier:
    """Copies the files of a job between this host and the bucket, in a thread of its own."""

    def __init__(self, spec: Spec, host: int, hidden: Sequence[str] = ()):
        """A carrier which puts `***` for what is `hidden`."""
        self._spec, self._host, self._bucket = spec, host, Bucket(spec.url)
        self._hidden = [secret.encode() for secret in hidden if secret]
        self._sent: dict[Path, Any] = {}
        log = spec.folder / "logs" / f"host-{host}.log"
        self._log = LogSender(self._bucket, log, host, self._hidden)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="carrier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends what is left."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(PUSH_S):
            self._push()
            self._pull_stop()
        self._push()

    def _push(self) -> None:
        folder, host = self._spec.folder, self._host
        with contextlib.suppress(OSError, UserError):  # the next round tries again
            self._log.send(closing=self._closing.is_set())
        files = [*folder.glob(f"stacks/host-{host}.*")]
        if host == 0 and (self._closing.is_set() or read_state(self._spec)["status"] not in OVER):
            files += [folder / name for name in PULLED]
        for path in files:
            with contextlib.suppress(OSError, UserError):
                stat = path.stat()
                stamp = stat.st_mtime_ns, stat.st_size
                if self._sent.get(path) != stamp:
                    data = path.read_bytes()
                    for secret in self._hidden:
                        data = data.replace(secret, b"***")
                    self._bucket.write(path.relative_to(folder).as_posix(), data)
                    self._sent[path] = stamp

    def _pull_stop(self) -> None:
        with contextlib.suppress(UserError):
            if self._host == 0 and self._bucket.entry("stop") is not None:
                (self._spec.folder / "stop").touch()


async def main() -> None:
    """Serves the job that the metadata name, until it is over."""
    url, incarnation = metadata.attribute("lmwright-job"), metadata.attribute("lmwright-slice")
    if not url or not incarnation:
        raise SystemExit("lmwright: error: this host was not made by `lmwright launch`")
    facts = metadata.tpu_env()
    worker, slice_index = int(facts["WORKER_ID"]), int(facts.get("MEGASCALE_SLICE_ID", 0))
    bucket = Bucket(url)
    spec, offer = _spec(bucket, incarnation)
    host = slice_index * offer.hosts_per_slice + worker
    several = {name: value for name, value in facts.items() if name.startswith(SEVERAL_SLICES)}
    variables = spec.variables | (several if offer.num_slices > 1 else {})
    spec = replace(spec, hosts=offer.hosts, variables=variables)
    address = await _leader_address(bucket, incarnation, host)
    spec = replace(spec, address=address)
    _keep(spec, bucket)
    secrets = _secrets(spec, bucket, host)
    with contextlib.suppress(OSError, UserError):  # it is compiled instead
        await asyncio.to_thread(receive_steps, bucket)
    spec = replace(spec, variables=spec.variables | secrets)  # in memory only
    carrier = Carrier(spec, host, tuple(secrets.values()))
    agent = Agent(spec, host, functools.partial(asyncio.to_thread, carrier.close) if host else None)
    agent.notice(await asyncio.to_thread(metadata.notice) or "")
    watch = asyncio.create_task(_watch_notices(agent))
    if host == 0:
        await lead(spec, agent)
    else:
        await agent.run()
    watch.cancel()
    await asyncio.to_thread(carrier.close)  # on host 0 last: its state tells that the job is over
    if agent.told_to_end:
        raise SystemExit("lmwright: told to end; the startup script starts it again if it can")
    if host == 0:
        await _delete_own_slice(spec, incarnation)


def _spec(bucket: Bucket, incarnation: str) -> tuple[Spec, Any]:
    """The job, and the offer that this slice was asked for with."""
    there, slices = bucket.read("job.json"), bucket.read("slices.json")
    if there is None or slices is None:
        raise SystemExit(f"lmwright: error: {bucket.url} is no job any more")
    spec = parse_spec(there[0])
    made = {entry["id"]: entry["offer"] for entry in json.loads(slices[0])["made"]}
    if incarnation not in made:
        raise SystemExit(f"lmwright: error: {bucket.url} does not know slice {incarnation}")
    return spec, spec.offers[made[incarnation]]


def _secrets(spec: Spec, bucket: Bucket, host: int) -> dict[str, str]:
    """Variables of the ranks that are secret. Where one cannot be read, the job fails."""
    assert spec.cloud is not None
    try:
        return read_secrets(spec.cloud.project, spec.cloud.secrets)
    except UserError as error:
        if host == 0:
            state = read_state(spec) | {"status": "failed", "error": str(error)}
            bucket.write("state.json", json.dumps(state))
        raise SystemExit(f"lmwright: error: {error}") from None


async def _leader_address(bucket: Bucket, incarnation: str, host: int) -> str:
    """Address of host 0, which that host tells all others."""
    if host == 0:
        address = metadata.read("instance/network-interfaces/0/ip") or "127.0.0.1"
        bucket.write(LEADER, json.dumps({"slice": incarnation, "address": address}))
        return address
    while True:
        there = await asyncio.to_thread(bucket.read, LEADER)
        facts = json.loads(there[0]) if there else {}
        if facts.get("slice") == incarnation:
            return facts["address"]
        await asyncio.sleep(POLL_S)


def _keep(spec: Spec, bucket: Bucket) -> None:
    """Makes the job's folder on this host; what the leader knew comes from the bucket."""
    if not spec.folder.exists():
        save_spec(spec)
        for name in (*PULLED, RUN_FILE):
            if there := bucket.read(name):
                (spec.folder / name).write_bytes(there[0])


async def _watch_notices(agent: Agent) -> None:
    """Tells the leader of a preemption or maintenance for as long as there is one."""
    while True:
        await asyncio.sleep(NOTICE_POLL_S)
        reason = await asyncio.to_thread(metadata.notice)
        if reason is not None and not agent.told_to_end:
            agent.notice(reason)


async def _delete_own_slice(spec: Spec, incarnation: str) -> None:
    """Deletes this slice after its job, if it is still there after a while."""
    if read_state(spec)["status"] not in OVER or spec.cloud is None:
        return
    await asyncio.sleep(spec.limits.alone_s)
    from lmwright.cloud.tpu_api import Tpus

    there = Bucket(spec.url).read("slices.json")
    made = json.loads(there[0])["made"] if there else []
    for entry in made:
        if entry["id"] == incarnation:
            Tpus(spec.cloud).delete(spec.offers[entry["offer"]].zone, incarnation)


if __name__ == "__main__":
    asyncio.run(main())
