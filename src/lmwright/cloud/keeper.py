"""Keeper: the supervisor of a job on a small VM that is always on.

    lmwright jobs follow NAME --on-vm --> VM: python -m lmwright.cloud.standby --> jobs follow gs://...

It has the Python, the packages and the account of the job's hosts, and deletes itself when the job
is over. vm.json beside the job names it, and is written before it is made. The claim of supervisors
lets one act at a time: while another one is alive, the VM waits.
"""

import hashlib
import json
from typing import Any

from lmwright.cloud import vm as machines
from lmwright.cloud.book import read_book
from lmwright.cloud.compute_api import Compute
from lmwright.cloud.spec import OVER, Spec
from lmwright.cloud.target import ZONE
from lmwright.cloud.vm import Vm
from lmwright.errors import UserError
from lmwright.guard.terminal import visible
from lmwright.guard.urls import redact_text
from lmwright.storage.bucket import Bucket

RECORD = "vm.json"
ROLE = "follow"
MACHINE = "e2-micro"
TASK = """until "$python" -m lmwright.cloud.standby; do sleep 20; done"""


def keep(spec: Spec, state: dict[str, Any], zone: str, machine: str, *, dry_run: bool) -> int:
    """Makes the VM of a job, unless it is there. Raises UserError for a job that is over."""
    vm = vm_of(spec, zone, machine)
    if dry_run:
        print(f"would write {spec.url}/{RECORD}")
        print(f"would call POST {vm.path.rpartition('/')[0]}")
        print(f"  {machines.shown(vm)}")
        return 0
    if state["status"] in OVER:
        raise UserError(
            f"job {spec.name} is {state['status']}; resume it first: lmwright jobs start "
            f"{spec.name} --detach"
        )
    compute = Compute(vm.cloud.project)
    there = _record(spec)
    if there and there["zone"] != vm.zone:
        standing = machines.state(compute, there["zone"], there["name"])
        if standing != "GONE":
            raise UserError(
                f"job {spec.name}: its VM {there['name']} is in {there['zone']} already "
                f"({standing}); leave out --zone"
            )
    standing = machines.state(compute, vm.zone, vm.name)
    if standing in machines.ENDED:
        compute.delete(vm.zone, "instances", vm.name)
    elif standing != "GONE":
        print(f"job {spec.name}: VM {vm.name} in {vm.zone} supervises it already ({standing})")
        return 0
    compute.check_zone(vm.zone)
    Bucket(spec.url).write(RECORD, json.dumps({"name": vm.name, "zone": vm.zone}))
    machines.make(compute, vm)
    print(
        f"job {spec.name}: VM {vm.name} in {vm.zone} supervises it, and deletes itself at its end"
    )
    print(f"see: lmwright jobs show {spec.name}")
    return 0


def vm_of(spec: Spec, zone: str, machine: str) -> Vm:
    """The VM of a job on slices. Raises UserError for another job."""
    if spec.cloud is None or not spec.url or not spec.cloud.project:
        raise UserError(f"--on-vm: job {spec.name} is not on TPU slices; follow it from here")
    zone = zone or spec.offers[0].zone
    if not ZONE.fullmatch(zone):
        raise UserError(f"--zone: {zone!r} is not a zone; write it as in us-central1-a")
    if not (code := read_book(Bucket(spec.url))["code"]):
        raise UserError(f"{spec.url}: has no staged code; launch the job again")
    mark = hashlib.sha256(spec.url.encode()).hexdigest()[:6]
    return Vm(
        name=f"lmwright-{spec.name}-{mark}",
        zone=zone,
        cloud=spec.cloud,
        machine_type=machine or MACHINE,
        role=ROLE,
        task=TASK,
        code=code,
        metadata={"lmwright-job": spec.url},
        boot_gib=20,
    )


def lines(spec: Spec) -> list[str]:
    """Lines of `jobs show` about the VM; none where there is none."""
    there = _record(spec)
    if there is None or spec.cloud is None:
        return []
    try:
        compute = Compute(spec.cloud.project)
        standing = machines.state(compute, there["zone"], there["name"])
        if standing == "GONE":
            return []
        console = machines.last_words(compute, there["zone"], there["name"])
    except UserError:
        standing, console = "not known", ""
    rows = [f"supervisor VM  {there['name']} in {there['zone']}: {standing}"]
    return rows + ([f"  it said      {visible(redact_text(console))[:200]}"] if console else [])


def remove(spec: Spec) -> None:
    """Deletes the VM, if there is one. Raises UserError where that is refused."""
    there = _record(spec)
    if there is None or spec.cloud is None:
        return
    Compute(spec.cloud.project).delete(there["zone"], "instances", there["name"])
    Bucket(spec.url).remove(RECORD)


def _record(spec: Spec) -> dict[str, Any] | None:
    there = Bucket(spec.url).read(RECORD)
    return json.loads(there[0]) if there else None
