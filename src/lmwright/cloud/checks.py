"""Checks: what the services are asked before a launch makes anything, and what it would make."""

import json
from contextlib import suppress

from lmwright.cloud.book import MADE, id_of, label_of
from lmwright.cloud.disk_check import check_disks
from lmwright.cloud.roles import warn_of_roles
from lmwright.cloud.service import Request
from lmwright.cloud.spec import OVER, Cloud, Spec
from lmwright.cloud.steps import kept_steps
from lmwright.cloud.target import note_crossing
from lmwright.cloud.tpu_api import Tpus, queued_resource
from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.guard.urls import redact_text
from lmwright.storage.bucket import Bucket

NEEDED = ("storage.objects.create", "storage.objects.get", "storage.objects.list")
NEEDED += ("storage.objects.delete", "storage.buckets.get")
BY_ROLE = "roles/storage.objectAdmin and roles/storage.legacyBucketReader"
NOT_CHECKED = (
    "not checked, since no service was asked: the bucket's permissions and region, the data in it, "
    "the roles of the hosts, {where}; `launch` asks before it makes anything"
)


def check(spec: Spec) -> list[str]:
    """Asks the services whether the job can run there; returns notes. Raises UserError."""
    assert spec.cloud is not None
    bucket = Bucket(spec.url)
    if missing := bucket.missing_permissions(NEEDED):
        raise UserError(
            f"{spec.url}: this account may not {', '.join(missing)}; give it the roles {BY_ROLE} "
            "on the bucket"
        )
    region = bucket.region().lower()
    if spec.cloud.gke is not None:
        from lmwright.cloud.gke.check import check_cluster

        return check_cluster(spec, region)
    return _check_zones(spec, spec.cloud, region)


def _check_zones(spec: Spec, cloud: Cloud, region: str) -> list[str]:
    tpus, notes = Tpus(cloud), []
    for offer in spec.offers:
        types = tpus.accelerator_types(offer.zone)
        if not offer.topology and offer.accelerator_type not in types:
            near = ", ".join(sorted(types)[:8]) or "none"
            raise UserError(f"--zone: {offer.zone} has no {offer.accelerator_type}; it has: {near}")
        if (runtimes := tpus.runtimes(offer.zone)) and offer.runtime not in runtimes:
            raise UserError(
                f"--on: {offer.zone} has no runtime version {offer.runtime}, which {offer.name} "
                "needs; choose another zone"
            )
        notes += note_crossing(region, offer.name, offer.zone)
    notes.append(f"the quota of project {cloud.project} for these chips is not told by the "
                 "service; a request beyond it is refused")  # fmt: skip
    return notes + check_disks(spec) + left_over(spec, tpus) + warn_of_roles(cloud, spec.url)


def left_over(spec: Spec, tpus: Tpus) -> list[str]:
    """Notes about slices of lmwright in the job's zones that nobody looks after: those of a job
    that is over, or was forgotten."""
    notes = []
    for zone in dict.fromkeys(offer.zone for offer in spec.offers):
        for request in tpus.requests(zone):
            if request.job != label_of(spec) and (reason := _left_over(request)):
                notes.append(
                    f"{request.id} in {zone} is {request.state} and left over ({reason}); if it is "
                    f"not wanted: gcloud compute tpus queued-resources delete {request.id} --force "
                    f"--zone={zone} --project={tpus.cloud.project}"
                )
    return notes


def _left_over(request: Request) -> str:
    """Reason why nobody looks after a request; empty where somebody may."""
    with suppress(UserError, ValueError):  # a bucket of somebody else
        if not request.url:
            return ""
        bucket = Bucket(request.url)
        there, state = bucket.read(MADE), bucket.read("state.json")
        if there is None:
            return f"its job {request.url} was forgotten"
        book = json.loads(there[0])
        current = None if book["current"] is None else book["made"][book["current"]]["id"]
        if current != request.id:
            return f"its job {request.url} does not know it"
        status = json.loads(state[0])["status"] if state else ""
        return f"its job {request.url} is {status}" if status in OVER else ""
    return ""


def describe(spec: Spec, code: str, run: Run | None) -> list[str]:
    """Every request and file that launching would make, and what was not checked."""
    assert spec.cloud is not None
    if spec.cloud.gke is not None:
        from lmwright.cloud.gke.describe import describe_calls

        unknown = NOT_CHECKED.format(where="the cluster and its nodes")
        files = [*_files(spec, code, run), unknown]
        return [f"# {line}" for line in files] + describe_calls(spec, code)
    lines = _files(spec, code, run)
    for number, offer in enumerate(spec.offers, 1):
        parent = f"projects/{spec.cloud.project}/locations/{offer.zone}"
        metadata = {"lmwright-job": spec.url, "startup-script": "..."}
        id = id_of(spec, number)
        described = queued_resource(spec.cloud, id, label_of(spec), offer, metadata)
        shown = type(described).to_json(described, indent=None)
        word = "would call" if number == 1 else "or else"
        lines.append(f"{word} POST {parent}/queuedResources?queuedResourceId={id}")
        lines.append(f"  {redact_text(' '.join(shown.split()))}")
    unknown = "zones, runtime versions, quota, and slices that are left over"
    return [*lines, NOT_CHECKED.format(where=unknown)]


def _files(spec: Spec, code: str, run: Run | None) -> list[str]:
    """Every file that launching would write."""
    lines = [f"would write {spec.url}/job.json, run.toml and {MADE}"]
    lines.append(f"would put Python, all packages and this lmwright into {code}")
    steps = [path.name for path in (kept_steps(run.name) if run else ())]
    return lines + [f"would write {spec.url}/steps/{name}, compiled by plan" for name in steps]
