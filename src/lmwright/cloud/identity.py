"""Identity: which host of which job this one is.

    metadata server of a TPU slice    attributes lmwright-job, lmwright-slice, tpu-env
    environment of a pod              LMWRIGHT_JOB_URL, LMWRIGHT_INCARNATION, TPU_WORKER_ID, ...

GKE gives the pods of a slice TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, and several slices find each
other by MEGASCALE_*; where these are missing they follow from the indices of the JobSet.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from lmwright.cloud import metadata

JOB_URL, CODE, INCARNATION = "LMWRIGHT_JOB_URL", "LMWRIGHT_CODE", "LMWRIGHT_INCARNATION"
LEADER, ADDRESS = "LMWRIGHT_LEADER", "LMWRIGHT_ADDRESS"
SLICE_INDEX, NUM_SLICES = "LMWRIGHT_SLICE_INDEX", "LMWRIGHT_NUM_SLICES"
WORKERS = "TPU_WORKER_ID", "JOB_COMPLETION_INDEX"
SEVERAL_SLICES = "MEGASCALE_"  # variables of the runtime by which slices find each other


@dataclass(frozen=True, kw_only=True)
class HostIdentity:
    """A host's place in its job, as it finds it."""

    url: str
    """Address of the job."""
    incarnation: str
    """Request that made its slice."""
    slice_index: int
    worker: int
    """Number in its slice."""
    address: str
    """Address of this host, for the other hosts."""
    leader: str = ""
    """Name of host 0 that stays when its pod is made again; empty where the bucket says it."""
    several: Mapping[str, str] = field(default_factory=dict)
    """Variables for its ranks, if there are several slices."""

    @property
    def in_pod(self) -> bool:
        return bool(self.leader)


def find_identity(variables: Mapping[str, str] = os.environ) -> HostIdentity:
    """The identity of this host. Raises SystemExit where it was not made by `lmwright launch`."""
    return _of_pod(variables) if variables.get(JOB_URL) else _of_slice()


def _of_slice() -> HostIdentity:
    url, incarnation = metadata.attribute("lmwright-job"), metadata.attribute("lmwright-slice")
    if not url or not incarnation:
        raise SystemExit("lmwright: error: this host was not made by `lmwright launch`")
    facts = metadata.tpu_env()
    return HostIdentity(
        url=url,
        incarnation=incarnation,
        slice_index=int(facts.get("MEGASCALE_SLICE_ID", 0)),
        worker=int(facts["WORKER_ID"]),
        address=metadata.read("instance/network-interfaces/0/ip") or "127.0.0.1",
        several={name: value for name, value in facts.items() if name.startswith(SEVERAL_SLICES)},
    )


def _of_pod(variables: Mapping[str, str]) -> HostIdentity:
    worker = next((variables[name] for name in WORKERS if variables.get(name)), "")
    index = variables.get(SLICE_INDEX, "")
    if not (worker.isdecimal() and index.isdecimal()):
        raise SystemExit(
            f"lmwright: error: {WORKERS[0]} and {SLICE_INDEX}: say no number of this pod; it was "
            "not made by `lmwright launch`"
        )
    leader = variables[LEADER]
    several = {
        "MEGASCALE_COORDINATOR_ADDRESS": leader,
        "MEGASCALE_NUM_SLICES": variables[NUM_SLICES],
        "MEGASCALE_SLICE_ID": index,
    }
    given = {name: value for name, value in variables.items() if name.startswith(SEVERAL_SLICES)}
    return HostIdentity(
        url=variables[JOB_URL],
        incarnation=variables[INCARNATION],
        slice_index=int(index),
        worker=int(worker),
        address=variables[ADDRESS],
        leader=leader,
        several=several | given,
    )
