"""Names of data disks: what `--disk` says, and where a disk is mounted.

    --disk wiki --> attached read-only --> /mnt/disks/wiki     data.dir = "/mnt/disks/wiki"

A disk lies in one zone; a short name means the disk of that name in the zone of the slice.
$LMWRIGHT_DISKS stands for another folder than /mnt/disks.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lmwright.cloud.spec import Cloud, Offer
from lmwright.errors import UserError

NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
FULL = re.compile(r"projects/([^/]+)/zones/([^/]+)/disks/([^/]+)")
FILL = "lmwright data push gs://BUCKET/FOLDER disk:{name} --zone {zone}"


def mount_root() -> Path:
    """Folder of all mounted disks."""
    return Path(os.environ.get("LMWRIGHT_DISKS", "/mnt/disks"))


def disk_name(disk: str) -> str:
    """Name of a disk that `--disk` names. Raises UserError."""
    name = disk.rpartition("/")[2] if FULL.fullmatch(disk) else disk
    if not NAME.fullmatch(name):
        raise UserError(
            f"--disk: {disk!r} names no disk; write NAME, or projects/PROJECT/zones/ZONE/disks/NAME"
        )
    return name


def source_of(disk: str, project: str, zone: str) -> str:
    """Full name of a disk, for a slice in a zone."""
    full = FULL.fullmatch(disk)
    return disk if full else f"projects/{project}/zones/{zone}/disks/{disk_name(disk)}"


def is_on_disk(path: str, disks: Sequence[str]) -> bool:
    """True for a path on one of the disks. Raises UserError for one of a disk that is not there."""
    root = f"{mount_root()}/"
    if not path.startswith(root):
        return False
    name = path.removeprefix(root).partition("/")[0]
    names = [disk_name(disk) for disk in disks]
    if name not in names:
        have = f"--disk names {', '.join(names)}" if names else "no --disk is given"
        raise UserError(f"data.dir: {path}: is on disk {name}, and {have}; add --disk {name}")
    return True


def refuse_other_zones(cloud: Cloud, offers: Sequence[Offer]) -> None:
    """Raises UserError for a disk that lies elsewhere than a slice may be."""
    names = [disk_name(disk) for disk in cloud.disks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--disk: {name} is named twice; name each disk once")
    for disk in cloud.disks:
        for offer in offers:
            full = FULL.fullmatch(disk)
            if full and full[2] != offer.zone:
                raise UserError(
                    f"--disk: {disk} is in {full[2]}, and {offer.name} is asked for in "
                    f"{offer.zone}; a disk serves its own zone only, so make one there: "
                    f"{FILL.format(name=full[3], zone=offer.zone)}"
                )
