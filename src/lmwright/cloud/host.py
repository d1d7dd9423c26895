"""Host: the agent of a host of a slice or of a pod, whose job lies in a bucket.

    identity --job, worker--> agent --logs, stacks, state--> bucket
                              ^-- stop, leader's address ---'

Host 0 of a slice says in the bucket where its leader listens. A new slice has another incarnation,
so that nobody talks to a leader that is gone. The first pod of a JobSet has a name that stays.
"""

import asyncio
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmwright.cloud import metadata
from lmwright.cloud.agent import Agent, lead
from lmwright.cloud.alone import Ended, leave, watch
from lmwright.cloud.book import MADE, fail_job
from lmwright.cloud.identity import HostIdentity, find_identity
from lmwright.cloud.ledger import slice_variable
from lmwright.cloud.pieces import LogSender
from lmwright.cloud.spec import (
    OVER,
    RUN_FILE,
    Limits,
    Offer,
    Spec,
    parse_spec,
    read_state,
    save_spec,
)
from lmwright.cloud.steps import receive_steps
from lmwright.cloud.times import LEADER, began_serving
from lmwright.cloud.vault import read_secrets
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket

POLL_S = 2.0
NOTICE_POLL_S = 2.0
PUSH_S = 5.0
PULLED = ("state.json", "events.log")
EXIT_TERMINATED = 143
SLICE_VARIABLE = "LMWRIGHT_ON"  # train.chips counts the devices


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
    """Serves the job that this host belongs to, until it is over; then its slice has to go."""
    identity, limits, at_once = find_identity(), Limits(), False
    try:
        bucket = Bucket(identity.url)
        spec, offer = _spec(bucket, identity.incarnation)
        limits = spec.limits
        await _serve(spec, offer, identity, bucket)
        reason = "the job is over"
    except Ended as ended:
        if identity.in_pod:
            raise SystemExit(f"lmwright: error: {ended}") from None
        reason, at_once = f"{ended}", ended.at_once
    except UserError as error:
        raise SystemExit(f"lmwright: error: {error}") from None
    if not identity.in_pod:
        try:
            await leave(identity, limits, reason, at_once=at_once)
        except UserError as error:  # it may not delete slices
            print(f"lmwright: error: {error}", flush=True)


async def _serve(spec: Spec, offer: Offer, identity: HostIdentity, bucket: Bucket) -> None:
    """Runs the agent, and on host 0 the leader. Raises Ended where there is nothing to do."""
    host = identity.slice_index * offer.hosts_per_slice + identity.worker
    several = dict(identity.several) if offer.num_slices > 1 else {}
    spec = replace(spec, hosts=offer.hosts, variables=_on_tpus(offer) | spec.variables | several)
    address = await _leader_address(bucket, identity, host)
    spec = replace(spec, address=address)
    _keep(spec, bucket)
    secrets = _secrets(spec, bucket, host)
    with contextlib.suppress(OSError, UserError):  # it is compiled instead
        await asyncio.to_thread(receive_steps, bucket)
    spec = replace(spec, variables=spec.variables | secrets)  # in memory only
    spec = replace(spec, variables=spec.variables | slice_variable(spec, identity.incarnation))
    carrier = Carrier(spec, host, tuple(secrets.values()))
    agent = Agent(spec, host, functools.partial(asyncio.to_thread, carrier.close) if host else None)
    agent.notice(await asyncio.to_thread(metadata.notice) or "")
    beside = [_watch_notices(agent)]
    beside += [] if identity.in_pod else [watch(spec, identity, host)]
    try:
        await _until_first(agent.run() if host else lead(spec, agent), *beside)
    finally:  # on host 0 last: its state tells that the job is over
        await asyncio.to_thread(carrier.close)
    if agent.told_to_end and read_state(spec)["status"] not in OVER:
        if identity.in_pod:  # at once: this exit code lets the cluster make the pod again
            os._exit(EXIT_TERMINATED)
        raise SystemExit("lmwright: told to end; the startup script starts it again if it can")


async def _until_first(*jobs: Coroutine[Any, Any, None]) -> None:
    """Runs all until one ends; raises its exception."""
    tasks = [asyncio.create_task(job) for job in jobs]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()


def _on_tpus(offer: Offer) -> dict[str, str]:
    """Variables that keep a rank from training without a TPU: JAX would train on the CPU, slowly
    and at the full price. They are left out where the host's own environment names a platform."""
    if os.environ.get("JAX_PLATFORMS"):
        return {}
    return {"JAX_PLATFORMS": "tpu,cpu", SLICE_VARIABLE: offer.name}


def _spec(bucket: Bucket, incarnation: str) -> tuple[Spec, Offer]:
    """The job, and the offer that this slice was asked for with. Raises Ended where it is gone."""
    there, slices = bucket.read("job.json"), bucket.read(MADE)
    if there is None or slices is None:
        raise Ended(f"{bucket.url} is no longer a job")
    spec = parse_spec(there[0])
    made = {entry["id"]: entry["offer"] for entry in json.loads(slices[0])["made"]}
    if incarnation not in made:
        raise Ended(f"{bucket.url} does not know slice {incarnation}")
    return spec, spec.offers[made[incarnation]]


def _secrets(spec: Spec, bucket: Bucket, host: int) -> dict[str, str]:
    """Variables of the ranks that are secret. Where one cannot be read, the job fails."""
    assert spec.cloud is not None
    if spec.cloud.gke is not None:  # the cluster has put them into the environment
        names = (pair.partition("=")[0] for pair in spec.cloud.secrets)
        return {name: os.environ[name] for name in names if name in os.environ}
    try:
        return read_secrets(spec.cloud.project, spec.cloud.secrets)
    except UserError as error:
        if host == 0:
            fail_job(bucket, str(error))
        raise Ended(f"{error}") from None


async def _leader_address(bucket: Bucket, identity: HostIdentity, host: int) -> str:
    """Address of host 0, which that host tells all others."""
    if host == 0:
        began = began_serving(bucket, identity.incarnation) or time.time()
        facts = {"slice": identity.incarnation, "address": identity.address, "began": began}
        bucket.write(LEADER, json.dumps(facts))
        return identity.address
    if identity.in_pod:
        return identity.leader
    while True:
        there = await asyncio.to_thread(bucket.read, LEADER)
        facts = json.loads(there[0]) if there else {}
        if facts.get("slice") == identity.incarnation:
            return facts["address"]
        await asyncio.sleep(POLL_S)


def _keep(spec: Spec, bucket: Bucket) -> None:
    """Makes the job's folder on this host; what the leader knew comes from the bucket."""
    if not spec.folder.exists():
        read = {name: bucket.read(name) for name in (*PULLED, RUN_FILE)}
        save_spec(spec, {name: there[0] for name, there in read.items() if there})


async def _watch_notices(agent: Agent) -> None:
    """Tells the leader of a preemption or maintenance for as long as it is announced: the leader
    may not be there yet, and this host is not to train again before it is gone."""
    while True:
        await asyncio.sleep(NOTICE_POLL_S)
        reason = await asyncio.to_thread(metadata.notice)
        if reason is not None and not agent.told_to_end:
            agent.notice(reason)


if __name__ == "__main__":
    asyncio.run(main())
