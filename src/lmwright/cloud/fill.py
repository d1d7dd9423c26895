"""Fill: `lmwright data push STORE disk:NAME`, a prepared store on a disk that slices mount.

    store --push--> bucket --helper VM--> new disk: copied, verified, attached to nobody
                                |
                                +-- how it stands --> gs://BUCKET/lmwright/disks/NAME.json

The disk says by its labels which store it is to hold, and whether it holds all of it. The helper
VM deletes itself at its end, and is deleted here in every case. Whatever an interrupted push has
left is found by its labels and named by the next one.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmwright.cloud import vm as machines
from lmwright.cloud.compute_api import Compute, Refused
from lmwright.cloud.disk_check import FILLED, FILLING, HYPERDISK, STATE, STORE
from lmwright.cloud.disk_names import NAME, mount_root
from lmwright.cloud.spec import Cloud
from lmwright.cloud.stage import stage
from lmwright.cloud.target import ZONE, Settings, cloud_of
from lmwright.cloud.vm import ROLE, Vm
from lmwright.data.push import push_store
from lmwright.data.stored import Stored, read_stored
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket, is_bucket

PREFIX = "disk:"
FILL_ROLE, VM_PREFIX = "fill", "lmwright-fill-"
# https://cloud.google.com/tpu/docs/attach-durable-block-storage
DISK_TYPES = ("pd-balanced", "hyperdisk-ml", "hyperdisk-balanced")
GIB = 2**30
LEAST_GIB = 10
SPARE = 1.06  # for the file system's own tables
MACHINES = {True: "c3-standard-4", False: "e2-standard-4"}  # Hyperdisk is not for all
SLOWEST_BYTES_PER_S = 20e6
POLL_S = 5.0
FIRST_WORD_S = 1200.0
TASK = """for try in 1 2 3; do "$python" -m lmwright.cloud.filler && break; sleep 5; done"""
DROP_VM = "gcloud compute instances delete {name} --zone={zone} --project={project}"
DROP_DISK = "gcloud compute disks delete {name} --zone={zone} --project={project}"


@dataclass(frozen=True, kw_only=True)
class Filling:
    """A disk that is to be made, and its store."""

    name: str
    zone: str
    cloud: Cloud
    type: str
    stored: Stored
    url: str
    """Address of the store in a bucket."""
    root: str
    """Folder of lmwright in a bucket."""

    @property
    def gib(self) -> int:
        """Size of the disk in GiB."""
        return max(LEAST_GIB, math.ceil(self.stored.size_bytes * SPARE / GIB) + 1)

    @property
    def hyper(self) -> bool:
        return self.type.startswith(HYPERDISK)

    def disk(self) -> dict[str, Any]:
        """The disk as the service takes it."""
        zone = f"projects/{self.cloud.project}/zones/{self.zone}"
        return {
            "name": self.name,
            "sizeGb": str(self.gib),
            "type": f"{zone}/diskTypes/{self.type}",
            "labels": {STATE: FILLING, STORE: self.stored.digest},
            "description": f"lmwright: {self.url}",
        }

    def vm(self, code: str, disk_id: str) -> Vm:
        """The helper VM as the service takes it."""
        facts = {"source": self.url, "disk": self.name, "disk-id": disk_id, "report": self.report}
        facts["job"] = f"{self.root}/disks"  # a folder for its output, where it cannot install
        return Vm(
            name=machines.check_name(self.name, VM_PREFIX),
            zone=self.zone,
            cloud=self.cloud,
            machine_type=MACHINES[self.hyper],
            role=FILL_ROLE,
            task=TASK,
            code=code,
            metadata={f"lmwright-{name}": value for name, value in facts.items()},
            disks=(self.name,),
            boot_gib=20,
            most_s=int(3600 + 2 * self.stored.size_bytes / SLOWEST_BYTES_PER_S),
        )

    @property
    def report(self) -> str:
        """URL of the object in which the helper reports its progress."""
        return f"{self.root}/disks/{self.name}.json"


def push_disk_command(
    source: str, target: str, settings: Settings, type: str, *, dry_run: bool = False
) -> None:
    """Makes the disk that `target` (disk:NAME) names and fills it, or prints the requests."""
    filling = plan_filling(source, target, settings, type)
    if dry_run:
        print("\n".join(describe(filling, source)))
        return
    compute = Compute(filling.cloud.project)
    compute.check_zone(filling.zone)
    for line in leftovers(compute, filling):
        print(f"note: {line}")
    there = compute.get(filling.zone, "disks", filling.name)
    if there is not None and is_filled(there, filling):
        print(f"disk {filling.name} in {filling.zone} holds this store already")
    else:
        if not is_bucket(source):
            push_store(source, filling.url)
        fill(compute, filling, there, print)
    path = mount_root() / filling.name
    print(f"use it with: lmwright launch run.toml --disk {filling.name} data.dir={path}")


def plan_filling(source: str, target: str, settings: Settings, type: str) -> Filling:
    """The disk of a push. Raises UserError where it cannot be made, before anything is asked."""
    name = target.removeprefix(PREFIX)
    if not NAME.fullmatch(name):
        raise UserError(
            f"{target}: {name!r} cannot name a disk; use small letters, digits and '-', beginning "
            "with a letter"
        )
    if not ZONE.fullmatch(settings.zone):
        what = f"{settings.zone!r} is not one zone" if settings.zone else "missing"
        raise UserError(f"--zone: {what}; a disk lies in the zone of its slices, as us-central2-b")
    if type not in DISK_TYPES:
        raise UserError(
            f"--disk-type: no TPU slice attaches a {type!r}; choose one of {', '.join(DISK_TYPES)}"
        )
    cloud, root = cloud_of(settings), settings.bucket.rstrip("/")
    if is_bucket(source):
        root, url = root or "/".join(source.split("/")[:3]) + "/lmwright", source.rstrip("/")
    elif root:
        url = f"{root}/data/{name}"
    else:
        raise UserError(
            f"{source}: the helper VM reads from a bucket; push it there first: lmwright data push "
            f"{source} gs://BUCKET/FOLDER, or name a --bucket"
        )
    machines.check_name(name, VM_PREFIX)
    return Filling(
        name=name, zone=settings.zone, cloud=cloud, type=type, stored=read_stored(source), url=url,
        root=root,
    )  # fmt: skip


def describe(filling: Filling, source: str) -> list[str]:
    """Every request that pushing would make."""
    zone = f"projects/{filling.cloud.project}/zones/{filling.zone}"
    vm = filling.vm(f"{filling.root}/code/...", "...")
    copies = [] if is_bucket(source) else [f"would copy {source} to {filling.url}"]
    access = ['{"accessMode": "READ_ONLY_MANY"}'] if filling.hyper else []
    return [
        *copies,
        f"would put Python, all packages and this lmwright into {filling.root}/code",
        f"would call POST {zone}/disks",
        f"  {json.dumps(filling.disk())}",
        f"would call POST {zone}/instances",
        f"  {machines.shown(vm)}",
        f"would read {filling.report} until all is copied and verified",
        f"would call DELETE {zone}/instances/{vm.name}",
        f"would call POST {zone}/disks/{filling.name}/setLabels ({STATE}: {FILLED})",
        *(f"would call PATCH {zone}/disks/{filling.name} {body}" for body in access),
    ]


def is_filled(disk: dict[str, Any], filling: Filling) -> bool:
    """True for a disk with this store, False for one that is half filled with it. Raises UserError
    for any other."""
    labels, place = disk.get("labels", {}), {"name": filling.name, "zone": filling.zone}
    drop = DROP_DISK.format(**place, project=filling.cloud.project)
    if labels.get(STATE) not in (FILLING, FILLED):
        raise UserError(
            f"disk {filling.name}: there is one in {filling.zone} already, which lmwright did not "
            "make; choose another name"
        )
    if labels.get(STORE) != filling.stored.digest:
        held = "half of another store" if labels[STATE] == FILLING else "another store"
        raise UserError(
            f"disk {filling.name}: there is one in {filling.zone} already with {held}; choose "
            f"another name, or delete it: {drop}"
        )
    return labels[STATE] == FILLED


def leftovers(compute: Compute, filling: Filling) -> list[str]:
    """Leftovers of interrupted pushes in the zone, apart from this disk's."""
    place = {"zone": filling.zone, "project": compute.project}
    lines = []
    for item in compute.named(filling.zone, "instances", ROLE):
        name = item["name"]
        if item["labels"][ROLE] == FILL_ROLE and name != f"{VM_PREFIX}{filling.name}":
            drop = DROP_VM.format(name=name, **place)
            lines.append(f"a helper VM of another push is there ({item['status']}): {drop}")
    for item in compute.named(filling.zone, "disks", STATE):
        if item["labels"][STATE] == FILLING and item["name"] != filling.name:
            drop = DROP_DISK.format(name=item["name"], **place)
            lines.append(f"disk {item['name']} was not filled to its end, and costs: {drop}")
    return lines


class Spoiled(UserError):
    """A disk that will not be filled."""


def fill(
    compute: Compute, filling: Filling, there: dict[str, Any] | None, tell: Callable[[str], None]
) -> None:
    """Makes and fills a disk, or goes on with one that is half filled."""
    zone, name = filling.zone, filling.name
    tell("staging Python, packages and this lmwright in the bucket")
    code = stage(f"{filling.root}/code")
    if there is not None:
        tell(f"disk {name}: going on with an interrupted push")
    else:
        tell(f"making disk {name}, {filling.gib} GiB, in {zone}")
        compute.make(zone, "disks", filling.disk())
        there = compute.get(zone, "disks", name)
        assert there is not None
    try:
        _run_vm(compute, filling, filling.vm(code, str(there.get("id", ""))), tell)
    except Spoiled:
        tell(f"deleting disk {name}, which is not filled")
        compute.delete(zone, "disks", name)
        raise
    except BaseException:
        drop = DROP_DISK.format(name=name, zone=zone, project=compute.project)
        tell(f"disk {name} is half filled and costs money; push again, or delete it: {drop}")
        raise
    _mark_filled(compute, filling)
    tell(f"disk {name}: {filling.stored.size_bytes:,} bytes copied and verified")


def _run_vm(compute: Compute, filling: Filling, vm: Vm, tell: Callable[[str], None]) -> None:
    """Runs the helper VM until the disk is filled; it is gone afterwards."""
    disk_id = vm.metadata["lmwright-disk-id"]
    if _report(filling, disk_id).get("state") == "verified":  # by a helper whose client was gone
        compute.delete(vm.zone, "instances", vm.name)
        return
    try:
        standing = machines.state(compute, vm.zone, vm.name)
        if standing in machines.ENDED:
            compute.delete(vm.zone, "instances", vm.name)
            standing = "GONE"
        if standing == "GONE":
            _clear_report(filling)
            tell(f"starting helper VM {vm.name}")
            _make(compute, vm)
        _follow(compute, filling, vm, disk_id, tell)
    finally:
        try:
            compute.delete(vm.zone, "instances", vm.name)
        except UserError as error:
            tell(f"helper VM {vm.name} deletes itself at its end, for here it cannot be: {error}")


def _make(compute: Compute, vm: Vm) -> None:
    try:
        machines.make(compute, vm)
    except Refused as error:
        raise Spoiled(f"{error}") from None


def _follow(
    compute: Compute, filling: Filling, vm: Vm, disk_id: str, tell: Callable[[str], None]
) -> None:
    began, shown, heard = time.monotonic(), "", False
    while True:
        standing = machines.state(compute, filling.zone, vm.name)
        report = _report(filling, disk_id)
        heard = heard or bool(report)
        state = report.get("state", "installing")
        if state == "verified":
            return
        if state == "failed":
            raise Spoiled(f"disk {filling.name}: {report['error']}")
        if standing in ("GONE", *machines.ENDED):
            last = machines.last_words(compute, filling.zone, vm.name)
            raise UserError(
                f"disk {filling.name}: its helper VM is {standing} ({last}); push again"
            )
        if not heard and time.monotonic() - began > FIRST_WORD_S:
            last = machines.last_words(compute, filling.zone, vm.name)
            raise UserError(
                f"disk {filling.name}: its helper VM reports nothing ({last}); does its account "
                f"read {filling.url} and write to {filling.root}?"
            )
        share = report.get("done_bytes", 0) / max(filling.stored.size_bytes, 1)
        text = f"{state} {min(share, 1.0):.0%}" if state == "copying" else state
        if text != shown:
            shown = text
            tell(f"disk {filling.name}: {text}")
        time.sleep(POLL_S)


def _report(filling: Filling, disk_id: str) -> dict[str, Any]:
    """The report of the helper of this very disk; empty before its first word."""
    folder, _, name = filling.report.rpartition("/")
    there = Bucket(folder).read(name)
    facts = json.loads(there[0]) if there else {}
    return facts if facts.get("disk_id") == disk_id else {}


def _clear_report(filling: Filling) -> None:
    folder, _, name = filling.report.rpartition("/")
    Bucket(folder).remove(name)


def _mark_filled(compute: Compute, filling: Filling) -> None:
    """Labels a disk as filled, and lets several hosts attach it."""
    zone, name = filling.zone, filling.name
    there = compute.get(zone, "disks", name)
    if there is None:
        raise UserError(f"disk {name}: was deleted by someone else; push again")
    if users := there.get("users"):
        who = ", ".join(user.rpartition("/")[2] for user in users)
        raise UserError(f"disk {name}: is still attached to {who}; detach it, and push again")
    labels = there["labels"] | {STATE: FILLED}
    words = {"labels": labels, "labelFingerprint": there.get("labelFingerprint", "")}
    if filling.hyper:
        compute.change(zone, "disks", name, "", {"name": name, "accessMode": "READ_ONLY_MANY"})
    compute.change(zone, "disks", name, "setLabels", words)
