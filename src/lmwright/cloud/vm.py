"""VM: a small machine of Compute Engine that does one task and is then deleted.

    leave.sh   at the end, whatever happens: deletes the VM, or at least switches it off
    startup.sh up to its mark: Python and lmwright from the bucket, as on the hosts of slices
    task       one command

With a time limit the service deletes it even where all of that fails.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from lmwright.cloud.compute_api import Compute
from lmwright.cloud.spec import Cloud
from lmwright.cloud.stage import STARTUP
from lmwright.cloud.tpu_api import SCOPE
from lmwright.errors import UserError
from lmwright.guard.urls import redact_text

IMAGE = "projects/debian-cloud/global/images/family/debian-12"
MARK = "# --- what the machine is for\n"
ROLE = "lmwright-role"  # label of every VM that lmwright makes
LIKE_A_HOST = {"tpu-env": "WORKER_ID: '0'\n"}
ENDED = ("STOPPING", "STOPPED", "TERMINATED", "SUSPENDED")

LEAVE = STARTUP.with_name("leave.sh")


@dataclass(frozen=True, kw_only=True)
class Vm:
    """A VM and its task."""

    name: str
    zone: str
    cloud: Cloud
    """Project, account and network; the rest is for slices."""
    machine_type: str
    role: str
    """Value of its label."""
    task: str
    """Shell command, with $python for that of the staged lmwright."""
    code: str
    """URL of the staged Python, packages and lmwright."""
    metadata: dict[str, str] = field(default_factory=dict)
    disks: tuple[str, ...] = ()
    """Names of disks that it writes to."""
    boot_gib: int = 10
    most_s: int = 0
    """After which the service deletes it; 0 for never."""

    @property
    def path(self) -> str:
        return f"projects/{self.cloud.project}/zones/{self.zone}/instances/{self.name}"


def script(task: str) -> str:
    """Startup script of a VM with this task."""
    install, mark, _ = STARTUP.read_text().partition(MARK)
    assert mark, "startup.sh has lost its mark"
    return f'{LEAVE.read_text()}{install}{MARK}python="$here/venv/bin/python"\n{task}\n'


def body(vm: Vm) -> dict[str, Any]:
    """The VM as the service takes it."""
    zone = f"projects/{vm.cloud.project}/zones/{vm.zone}"
    facts = {"lmwright-code": vm.code, "lmwright-self": vm.path, **LIKE_A_HOST, **vm.metadata}
    facts["lmwright-slice"] = vm.name  # the name of its output, where it cannot install
    facts["startup-script"] = script(vm.task)
    boot = {
        "boot": True,
        "autoDelete": True,
        "initializeParams": {
            "sourceImage": IMAGE,
            "diskSizeGb": str(vm.boot_gib),
            "diskType": f"{zone}/diskTypes/pd-balanced",
        },
    }
    data = [
        {"source": f"{zone}/disks/{name}", "deviceName": name, "mode": "READ_WRITE",
         "autoDelete": False, "boot": False}
        for name in vm.disks
    ]  # fmt: skip
    limit: dict[str, Any] = {}
    if vm.most_s:
        limit = {"maxRunDuration": {"seconds": str(vm.most_s)}}
        limit |= {"instanceTerminationAction": "DELETE"}
    account = vm.cloud.service_account or "default"
    return {
        "name": vm.name,
        "machineType": f"{zone}/machineTypes/{vm.machine_type}",
        "labels": {ROLE: vm.role},
        "disks": [boot, *data],
        "networkInterfaces": [_network(vm)],
        "serviceAccounts": [{"email": account, "scopes": [SCOPE]}],
        "scheduling": limit,
        "metadata": {"items": [{"key": key, "value": text} for key, text in facts.items()]},
    }


def shown(vm: Vm) -> str:
    """The VM as a dry run prints it, without credentials and its long script."""
    facts = body(vm)
    for item in facts["metadata"]["items"]:
        if item["key"] == "startup-script":
            item["value"] = "..."
    return redact_text(json.dumps(facts))


def _network(vm: Vm) -> dict[str, Any]:
    network, subnetwork = vm.cloud.network, vm.cloud.subnetwork
    root = f"projects/{vm.cloud.project}"
    interface: dict[str, Any] = {}
    if network or not subnetwork:
        name = network or "default"
        interface["network"] = name if "/" in name else f"{root}/global/networks/{name}"
    if subnetwork:
        region = f"{root}/regions/{vm.zone.rpartition('-')[0]}/subnetworks"
        interface["subnetwork"] = subnetwork if "/" in subnetwork else f"{region}/{subnetwork}"
    if vm.cloud.external_ips:
        interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "external-nat"}]
    return interface


def make(compute: Compute, vm: Vm) -> None:
    """Makes a VM."""
    compute.make(vm.zone, "instances", body(vm))


def state(compute: Compute, zone: str, name: str) -> str:
    """Status of a VM, as RUNNING; GONE where there is none."""
    there = compute.get(zone, "instances", name)
    return there["status"] if there else "GONE"


def last_words(compute: Compute, zone: str, name: str) -> str:
    """The last lines that lmwright has printed on a VM."""
    lines = [line.strip() for line in compute.console(zone, name).splitlines()]
    told = [line for line in lines if "lmwright: error:" in line] or [x for x in lines if x]
    return told[-1] if told else "it said nothing"


def check_name(name: str, prefix: str) -> str:
    """Name of the VM for a disk or a job. Raises UserError where it would be too long."""
    whole = f"{prefix}{name}"
    if len(whole) > 63:
        raise UserError(f"{name}: is too long for the name of a VM; use {63 - len(prefix)} letters")
    return whole
