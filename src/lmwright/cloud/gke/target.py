"""Target: what `--on gke:CLUSTER --slice` and the settings ask for."""

import re

from lmwright.cloud.gke.context import find_context
from lmwright.cloud.spec import Cloud, Gke, Offer
from lmwright.cloud.target import Settings
from lmwright.cloud.vault import TOKEN
from lmwright.errors import UserError
from lmwright.hardware.slices import Slice, parse_slice

PREFIX = "gke:"
LONGEST_NAME = 36
"""Characters in the name of a job: the names of its pods have at most 63."""
SECRET = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([a-z0-9][a-z0-9.-]{0,252})/([A-Za-z0-9._-]{1,253})")
LABEL = re.compile(
    r"([a-z0-9.-]+/)?[A-Za-z0-9][\w.-]{0,62}=([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?"
)
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
CAPACITIES = ("spot", "on-demand", "reserved")


def cloud_of_gke(target: str, settings: Settings) -> Cloud:
    """Settings by which JobSets are made. Raises UserError."""
    if settings.capacity not in CAPACITIES:
        raise UserError("--guaranteed: GKE has no such capacity; use --reservation or --spot")
    for pair in settings.secrets:
        if not SECRET.fullmatch(pair) or TOKEN.search(pair):
            name = pair.partition("=")[0]
            raise UserError(
                f"--secret: {name}=...: write VARIABLE=SECRET/KEY, the names of a Kubernetes "
                "secret and of a key in it, and not the secret itself"
            )
    for label in settings.labels:
        if not LABEL.fullmatch(label):
            raise UserError(f"--label: {label!r} is not a Kubernetes label; write e.g. team=nlp")
    for option, name in (("--namespace", settings.namespace), ("--queue", settings.queue)):
        if name and not NAME.fullmatch(name):
            raise UserError(f"{option}: {name!r} cannot be a name in Kubernetes; correct it")
    return Cloud(
        capacity=settings.capacity,
        reservation=settings.reservation.rpartition("/")[2],
        secrets=settings.secrets,
        max_hours=settings.max_hours,
        max_chip_hours=settings.max_chip_hours,
        max_cost=settings.max_cost,
        gke=Gke(
            context=find_context(target.removeprefix(PREFIX)),
            namespace=settings.namespace,
            image=settings.image,
            account=settings.pod_account,
            queue=settings.queue,
            labels=settings.labels,
        ),
    )


def offers_of_gke(slices: str, settings: Settings, context: str) -> tuple[Offer, ...]:
    """The slices that `--slice` names. Raises UserError."""
    if not slices:
        raise UserError("--slice: missing; name the slice of the cluster, as in --slice 7x-16")
    spot = settings.capacity == "spot"
    return tuple(_offer(parse_slice(name), settings, context, spot) for name in slices.split(","))


def _offer(where: Slice, settings: Settings, context: str, spot: bool) -> Offer:
    chip = where.family
    if not chip.kubernetes:
        raise UserError(f"--slice: {where.name}: GKE has no {chip.name}; see --on {where.name}")
    if where.num_slices > 1 and where.num_hosts == 1:
        raise UserError(
            f"--slice: {where.name}: GKE joins only slices of several hosts; choose larger slices, "
            "or one"
        )
    alone = chip.kubernetes_alone if where.num_hosts == 1 else ""
    price = (chip.price.spot if spot else None) or chip.price.on_demand
    return Offer(
        name=where.name,
        zone=f"{context}/{settings.namespace}",
        accelerator_type=alone or chip.kubernetes,
        topology="x".join(map(str, where.shape)),
        runtime=settings.image,
        num_slices=where.num_slices,
        hosts_per_slice=where.num_hosts,
        num_chips=where.num_chips,
        price=price,
    )
