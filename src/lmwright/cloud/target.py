"""Target: what `--on`, `--zone` and the settings ask for, as offers of the TPU service.

~/.config/lmwright/cloud.toml holds what is the same for every launch; options come first:

    project = "my-project"
    zone = "us-central2-b"
    service_account = "trainer@my-project.iam.gserviceaccount.com"
"""

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lmwright.cloud.disk_names import is_on_disk
from lmwright.cloud.spec import Cloud, Offer, Terms
from lmwright.cloud.vault import parse_pairs
from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.hardware.slices import Slice, parse_slice
from lmwright.storage.bucket import is_bucket
from lmwright.storage.kaggle import is_kaggle_name

PROJECT_VARIABLES = ("CLOUDSDK_CORE_PROJECT", "GOOGLE_CLOUD_PROJECT")
CAPACITIES = ("spot", "on-demand", "reserved", "guaranteed")
CONTINENTS = ("us", "eu", "asia")  # of buckets in several regions
ZONE = re.compile(r"[a-z]+-[a-z]+\d+-[a-z]")
NO_GCLOUD = "gcloud is not installed; install the Google Cloud CLI and log in with it"
JOB_NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Settings(Terms):
    """Options of `lmwright launch` for slices; also the fields of cloud.toml."""

    zone: str = ""
    """Or several, with commas, in the order in which they are tried."""
    internal_ips: bool = False
    bucket: str = ""
    """Folder of jobs, as in gs://BUCKET/lmwright."""
    notify: str = ""
    """Shell command that gets each event of a job on its standard input."""
    ssh: str = "ssh"
    """Command that reaches the hosts of `--on ssh:`, as in `ssh -F FILE`."""
    remote_python: str = "python3"
    """Command of their Python that has lmwright."""
    namespace: str = "default"
    """Namespace of the pods of `--on gke:`."""
    image: str = "python:3.12-slim"
    """Image of their containers; it needs a python3 and glibc, all else is brought along."""
    pod_account: str = ""
    """Kubernetes service account of the pods, which may write to the bucket by Workload
    Identity."""
    queue: str = ""
    """Local queue of Kueue."""
    labels: tuple[str, ...] = ()
    """Labels as KEY=VALUE."""


def settings_path() -> Path:
    """cloud.toml of this user."""
    root = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(root, "lmwright", "cloud.toml")


def settings_with(**options: Any) -> Settings:
    """The settings file, with the options that were given in its place. Raises UserError for an
    unknown field or a wrong type."""
    path = settings_path()
    try:
        written = tomllib.loads(path.read_text())
    except FileNotFoundError:
        written = {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    known = {entry.name: entry.type for entry in fields(Settings)}
    for name, value in written.items():
        if name not in known:
            raise UserError(f"{path}: {name}: no such setting; there are: {', '.join(known)}")
        default = getattr(Settings(), name)
        number = isinstance(default, float) and isinstance(value, int)
        if isinstance(default, tuple):
            written[name] = tuple(value) if isinstance(value, list) else (value,)
        elif not number and not isinstance(value, type(default)):
            raise UserError(f"{path}: {name}: must be a {type(default).__name__}")
    chosen = {name: value for name, value in options.items() if value}
    if "capacity" in chosen and "reservation" in chosen:
        raise UserError(f"--reservation: conflicts with --{chosen['capacity']}; give only one")
    if "capacity" in chosen:  # in the place of the file's
        written.pop("reservation", None)
    settings = Settings(**written | chosen)
    if settings.capacity not in CAPACITIES:
        raise UserError(f"{path}: capacity: must be one of {', '.join(CAPACITIES)}")
    if settings.bucket and not is_bucket(settings.bucket):
        place = "--bucket" if "bucket" in chosen else f"{path}: bucket"
        raise UserError(f"{place}: {settings.bucket!r} is not a bucket; write gs://BUCKET/FOLDER")
    for name in ("valid_hours", "max_hours", "max_chip_hours", "max_cost"):
        if not getattr(settings, name) >= 0:  # NaN, too
            place = f"--{name.replace('_', '-')}" if name in chosen else f"{path}: {name}"
            raise UserError(f"{place}: must be a number above 0; without it there is no limit")
    return replace(settings, capacity="reserved") if settings.reservation else settings


def cloud_of(settings: Settings) -> Cloud:
    """Settings by which slices are made. Raises UserError where the project is not known."""
    project = settings.project or next(filter(None, map(os.environ.get, PROJECT_VARIABLES)), "")
    if not project:
        raise UserError(
            f"--project: missing; name the Google Cloud project, here or in {settings_path()}"
        )
    parse_pairs(settings.secrets)
    terms = {each.name: getattr(settings, each.name) for each in fields(Terms)}
    return Cloud(external_ips=not settings.internal_ips, **terms | {"project": project})


ELSEWHERE = "processes here like local:2x1, other places are kaggle, ssh:HOSTS and gke:CLUSTER"


def offers_of(target: str, settings: Settings) -> tuple[Offer, ...]:
    """The slices that `--on` names in all zones. Raises UserError."""
    slices = [parse_slice(name, ELSEWHERE) for name in target.split(",")]
    zones = [zone.strip() for zone in settings.zone.split(",") if zone.strip()]
    if not zones:
        raise UserError("--zone: missing; name where the slice is to be, as in us-central2-b")
    for zone in zones:
        refuse_zone(zone)
    spot = settings.capacity == "spot"
    return tuple(_offer(where, zone, spot) for where in slices for zone in zones)


def refuse_zone(zone: str) -> None:
    """Raises UserError for what cannot be the name of a zone."""
    if not ZONE.fullmatch(zone):
        raise UserError(f"--zone: {zone!r} is not a zone; write it as in us-central2-b")


def note_crossing(region: str, what: str, place: str) -> list[str]:
    """Note on the price of a bucket in another region than what reads it, whose zone or region is
    `place`; none where either is not known, or the bucket spans a continent."""
    if not region or not place or place.startswith(region) or region in CONTINENTS:
        return []
    return [
        f"the bucket is in {region} and {what} in {place}: what is read and saved crosses regions, "
        "which costs from 0.02 USD for each GB"
    ]


def _offer(where: Slice, zone: str, spot: bool) -> Offer:
    chip = where.family
    if chip.cloud is None:
        raise UserError(
            f"--on: {where.name}: {chip.name} is on Kubernetes only, and not in the Cloud TPU API; "
            f"write --on gke:CLUSTER --slice {where.name}"
        )
    single_slice = Slice(generation=where.generation, shape=where.shape)
    named = ":" not in single_slice.name
    size = single_slice.name.rpartition("-")[2] if named else ""
    price = (chip.price.spot if spot else None) or chip.price.on_demand
    return Offer(
        name=where.name,
        zone=zone,
        accelerator_type=f"{chip.cloud.prefix}-{size}" if named else chip.cloud.api_type,
        topology="" if named else "x".join(map(str, where.shape)),
        runtime=chip.cloud.runtime,
        num_slices=where.num_slices,
        hosts_per_slice=where.num_hosts,
        num_chips=where.num_chips,
        price=price,
    )


def weights_of(run: Run) -> list[tuple[str, str]]:
    """Fields of a run that name weights to read, and the places there."""
    every = {"train.init_from": run.train.init_from, **run.objective.reads_from}
    return [(field, place) for field, place in every.items() if place]


def refuse_local_places(run: Run, disks: Sequence[str] = ()) -> None:
    """Raises UserError for a run that needs files of this machine."""
    for field, path, cure in (
        ("dir", run.dir, "write dir = 'gs://BUCKET/FOLDER'"),
        ("data.dir", run.data.dir, "copy it there: lmwright data push FOLDER gs://BUCKET/FOLDER"),
    ):
        on_disk = field == "data.dir" and is_on_disk(path, disks)
        if not on_disk and not is_bucket(path):
            raise UserError(f"{field}: {path}: the hosts of a slice cannot see it; {cure}")
    for field, source in weights_of(run):
        if is_kaggle_name(source):
            raise UserError(
                f"{field}: {source}: the hosts of a slice have neither Kaggle's client nor your "
                f"token; copy it to a bucket first: lmwright import {source} gs://BUCKET/FOLDER"
            )
        if not is_bucket(source) and os.path.exists(source):
            raise UserError(
                f"{field}: {source}: the hosts of a slice cannot see it; name it by its hub name "
                "or a gs:// URL"
            )
