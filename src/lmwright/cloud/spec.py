"""Spec: what an agent is told of its job; and the job's folder, where everything is kept.

~/.local/state/lmwright/jobs/NAME/
  job.json         the command, the hosts, the limits     written once
  state.json       status, attempt, step, last error      by the leader
  stop             there when the job is to stop
  logs/host-N.log  output of the rank on that host, all attempts
  stacks/          of ranks that hung
"""

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lmwright.errors import UserError
from lmwright.guard.files import write_whole
from lmwright.guard.temporary import temporary_file

OVER = ("done", "stopped", "failed")
START = {"status": "starting", "attempt": 0, "failures": 0, "step": 0, "saved": 0, "error": ""}
PROGRAM = "lmwright"
JOB, FOLDERS = "job.json", ("logs", "stacks", "beats")
HIDDEN = ".job-"  # folders that are being made or removed
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
RUN_FILE = "run.toml"  # in the job's folder, where the hosts do not have the user's file
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,60}")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds after which a rank without a sign of life hangs, by what it was doing."""

    step_floor_s: float = 60.0
    """Least time without a step that counts as a hang; five times the median step, if that is
    longer."""
    start_s: float = 360.0
    """Time for importing, and waiting for the other hosts."""
    restore_s: float = 900.0
    compile_s: float = 1800.0
    beside_s: float = 900.0
    """Time for a batch of an evaluation, or a save."""
    silent_s: float = 10.0
    """Time without a message from an agent after which its host is lost."""
    grace_s: float = 60.0
    """Time for the other ranks to end, after one has ended as it should."""
    gather_s: float = 1200.0
    """Time for all hosts of a slice to be there before an attempt."""
    failures: int = 5
    """Failures in a row, without a new checkpoint, after which the job is given up."""
    backoff_s: float = 60.0
    """Longest pause between failures."""
    alone_s: float = 600.0
    """Time after its job's end at which a slice that nobody has deleted deletes itself."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A slice that a job may run on, and how it is asked for."""

    name: str
    """Name of the slice, as in 2xv4-32."""
    zone: str
    accelerator_type: str
    topology: str = ""
    """Topology in place of a size, as in 2x2x4; then `accelerator_type` is the API's word."""
    runtime: str
    num_slices: int = 1
    hosts_per_slice: int
    num_chips: int
    """Chips of all slices."""
    price: float = 0.0
    """Price in USD for one chip and hour."""

    @property
    def hosts(self) -> int:
        """Hosts of all slices."""
        return self.num_slices * self.hosts_per_slice


@dataclass(frozen=True, kw_only=True)
class Gke:
    """Settings by which the pods of a job are made."""

    context: str
    """Context of the kubeconfig, as in gke_PROJECT_ZONE_CLUSTER."""
    namespace: str = "default"
    image: str
    """Image of the pods, with a python3; all else is brought along."""
    account: str = ""
    """Kubernetes service account; empty for the namespace's default."""
    queue: str = ""
    """Local queue of Kueue."""
    labels: tuple[str, ...] = ()
    """Labels as KEY=VALUE."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Terms on which slices are asked for, and limits on their use."""

    project: str = ""
    """Google Cloud project; none on Kubernetes."""
    capacity: str = "on-demand"
    """Kind of capacity: on-demand, spot, reserved or guaranteed."""
    reservation: str = ""
    service_account: str = ""
    """Service account of the hosts; empty for the project's default."""
    network: str = ""
    subnetwork: str = ""
    disks: tuple[str, ...] = ()
    """Read-only disks, as NAME or projects/P/zones/Z/disks/NAME."""
    secrets: tuple[str, ...] = ()
    """Secrets as VARIABLE=NAME of Secret Manager, on Kubernetes as VARIABLE=SECRET/KEY."""
    valid_hours: float = 0.0
    """Hours that a request may wait; 0 is no limit."""
    max_hours: float = 0.0
    """Hours with slices, in all; 0 is no limit."""
    max_chip_hours: float = 0.0
    max_cost: float = 0.0
    """Cost in USD, by the list price, that the job may have."""


@dataclass(frozen=True, kw_only=True)
class Cloud(Terms):
    """Settings by which the slices of a job are made."""

    external_ips: bool = True
    gke: Gke | None = None
    """Settings of Kubernetes; None for queued resources."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A job."""

    name: str
    dir: str
    """The run directory; empty for a command without one."""
    command: tuple[str, ...]
    """Command of one rank; all hosts run the same. `lmwright` is the one of the host's Python."""
    hosts: int
    port: int
    """Port of the leader, on host 0."""
    address: str = "127.0.0.1"
    """Address of host 0."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks, on top of their host's."""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """Secret that only the agents of this job know."""
    limits: Limits = field(default_factory=Limits)
    url: str = ""
    """Folder of the job in a bucket; empty for a job of this machine."""
    cloud: Cloud | None = None
    cwd: str = ""
    """Working folder of the ranks; empty for the job's folder."""
    offers: tuple[Offer, ...] = ()
    """Offers in the order in which they are tried."""

    @property
    def folder(self) -> Path:
        return jobs_folder() / self.name

    def refuse_host(self, host: int, hosts: int | None = None) -> None:
        """Raises UserError for a host that the job, or its slice of `hosts`, does not have."""
        hosts = self.hosts if hosts is None else hosts
        if not 0 <= host < hosts:
            raise UserError(f"--host: {host} is none of 0 to {hosts - 1}")


def jobs_folder() -> Path:
    """Folder of all jobs that were launched from this machine."""
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root, "lmwright", "jobs")


def save_spec(spec: Spec, files: Mapping[str, str | bytes] | None = None) -> None:
    """Makes the job's folder with these files, which only its user may read: all of it, or nothing.
    Raises UserError if the name is taken."""
    if not NAME.fullmatch(spec.name):
        raise UserError(
            f"--name: {spec.name!r} cannot name a job; use small letters, digits, '-', '_' and '.'"
        )
    jobs_folder().mkdir(parents=True, exist_ok=True)
    made = _hidden_folder()
    try:
        made.mkdir(mode=0o700)
        for name in FOLDERS:
            (made / name).mkdir()
        for name, content in {**(files or {}), JOB: dump_spec(spec)}.items():
            write_whole(made / name, content, mode=0o600)
        made.rename(spec.folder)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError):
            if error.errno in TAKEN:
                raise _taken(spec) from None
            error.filename = str(spec.folder)
        raise


def _taken(spec: Spec) -> UserError:
    if (spec.folder / JOB).exists():
        cure = f"choose another, or `lmwright jobs forget {spec.name}` if it is over"
        return UserError(f"--name: there is a job {spec.name!r} already; {cure}")
    return UserError(f"--name: {spec.folder} is there without a job; remove it, or choose another")


def remove_job(spec: Spec) -> None:
    """Removes the job's folder. It is no job any more before the first of its files is removed."""
    gone = _hidden_folder()
    spec.folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _hidden_folder() -> Path:
    """A new name beside the jobs. Removes those that killed processes left, with their token."""
    return temporary_file(jobs_folder(), f"{HIDDEN[1:]}{secrets.token_hex(4)}")


def load_spec(name: str) -> Spec:
    """The job of a name. Raises UserError where there is none, or one of another version."""
    path = jobs_folder() / name / JOB
    try:
        return parse_spec(path.read_bytes())
    except OSError:
        known = ", ".join(job_names()) or "there are none"
        raise UserError(f"no job is called {name!r}; jobs: {known}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(
            f"{path}: is damaged, or was written by another version of lmwright; use that version, "
            "or remove its folder"
        ) from None


def parse_spec(data: bytes) -> Spec:
    """A job from its job.json. Raises ValueError, TypeError or KeyError for other data."""
    facts = json.loads(data)
    facts["limits"] = Limits(**facts["limits"])
    facts["command"] = tuple(facts["command"])
    if cloud := facts["cloud"]:
        lists = {name: tuple(cloud.get(name, ())) for name in ("disks", "secrets")}
        gke = cloud.get("gke") and Gke(**cloud["gke"] | {"labels": tuple(cloud["gke"]["labels"])})
        facts["cloud"] = Cloud(**cloud | lists | {"gke": gke})
    facts["offers"] = tuple(Offer(**offer) for offer in facts["offers"])
    return Spec(**facts)


def job_names() -> list[str]:
    """Jobs of this machine, by name."""
    names = (path.parent.name for path in jobs_folder().glob(f"*/{JOB}"))
    return sorted(name for name in names if not name.startswith(HIDDEN))


def dump_spec(spec: Spec) -> str:
    """The job as the text of job.json."""
    return json.dumps(asdict(spec), indent=1)


def write_state(spec: Spec, state: dict[str, Any]) -> None:
    """Replaces state.json."""
    write_whole(spec.folder / "state.json", json.dumps(state, indent=1), mode=0o600)


def read_state(spec: Spec) -> dict[str, Any]:
    """The content of state.json; a job that has not begun is `starting`."""
    try:
        return json.loads((spec.folder / "state.json").read_bytes())
    except (OSError, ValueError):
        return dict(START)
