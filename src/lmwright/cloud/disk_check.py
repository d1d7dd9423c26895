"""The disks of a job or of a push, as Compute Engine shows them.

A disk that `lmwright data push` fills has labels: which store it holds, and whether all of it.
"""

from typing import Any

from lmwright.cloud.compute_api import Compute, Refused
from lmwright.cloud.disk_names import FILL, FULL, source_of
from lmwright.cloud.spec import Offer, Spec
from lmwright.errors import UserError
from lmwright.hardware.chips import CHIPS

STATE, STORE = "lmwright-state", "lmwright-store"
FILLING, FILLED = "filling", "filled"
HYPERDISK = "hyperdisk"


def check_disks(spec: Spec) -> list[str]:
    """Checks the disks of a job with the service; returns notes. Raises UserError where one is
    missing, not filled yet, or of a type that the slice cannot attach."""
    assert spec.cloud is not None
    notes = []
    for disk in spec.cloud.disks:
        for offer in spec.offers:
            full = FULL.fullmatch(source_of(disk, spec.cloud.project, offer.zone))
            assert full is not None
            project, zone, name = full.groups()
            try:
                there = Compute(project).get(zone, "disks", name)
            except Refused as error:
                notes.append(f"it is not known whether disk {name} is there ({error})")
                continue
            _check_disk(name, zone, offer, there)
    return notes


def _check_disk(name: str, zone: str, offer: Offer, there: dict[str, Any] | None) -> None:
    fill = FILL.format(name=name, zone=zone)
    if there is None:
        raise UserError(f"--disk: there is no disk {name} in {zone}; make it: {fill}")
    if there.get("labels", {}).get(STATE) == FILLING:
        raise UserError(f"--disk: {name} in {zone} is not filled yet; continue with: {fill}")
    type = there.get("type", "").rpartition("/")[2]
    names = [chip.cloud for chip in CHIPS.values() if chip.cloud]
    takers = [each for each in names if each.disks == HYPERDISK]
    size_of = offer.accelerator_type.partition("-")[0]  # as in v6e-8; a topology has the API's word
    hyper = any(size_of in (each.prefix, each.api_type) for each in takers)
    if type and type.startswith(HYPERDISK) != hyper:
        wanted = "hyperdisk-ml" if hyper else "pd-balanced"
        raise UserError(
            f"--disk: {name} is a {type}, which {offer.name} does not attach; make another: "
            f"{fill} --disk-type {wanted}"
        )
    if hyper and there.get("accessMode") not in ("READ_ONLY_MANY", None):
        raise UserError(
            f"--disk: {name} may be attached to one host only; change that: gcloud compute disks "
            f"update {name} --zone={zone} --access-mode=READ_ONLY_MANY"
        )
