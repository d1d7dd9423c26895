"""Check: whether a cluster can run a job, before anything of it is made there."""

from collections import Counter
from typing import Any

from lmwright.cloud.gke.cluster import Absent, Cluster, Refused
from lmwright.cloud.gke.context import location_of
from lmwright.cloud.gke.manifest import (
    ACCELERATOR,
    CHIPS,
    GROUP,
    PLURAL,
    SPOT,
    TOPOLOGY,
    VERSION,
    chips_per_host,
    selector,
)
from lmwright.cloud.spec import Offer, Spec
from lmwright.cloud.target import note_crossing
from lmwright.errors import UserError

JOBSET_HELP = "https://jobset.sigs.k8s.io/docs/installation"
NEEDED = (("create", GROUP, PLURAL), ("get", GROUP, PLURAL), ("list", GROUP, PLURAL))
NEEDED += (("delete", GROUP, PLURAL), ("list", "", "pods"))
KUEUE = "kueue.x-k8s.io", "v1beta1"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


def check_cluster(spec: Spec, region: str) -> list[str]:
    """Asks the cluster whether the job can run there; returns notes. Raises UserError that names
    all that is missing. `region` is the bucket's, in small letters."""
    assert spec.cloud is not None and spec.cloud.gke is not None
    cluster, gke = Cluster(spec.cloud, spec.url), spec.cloud.gke
    missing, notes = _missing_of_cluster(cluster), []
    for number, (named, problem) in enumerate(_objects(cluster)):
        try:
            if told := _look(cluster, named):
                notes.append(told)
        except Absent:
            missing.append(problem)
            if number == 0:
                break  # nothing else can be in a namespace that is not there
    if missing:
        raise UserError(f"--on: cluster {gke.context}: {'; '.join(missing)}")
    for offer in spec.offers:
        notes += _nodes(cluster, offer)
    return notes + note_crossing(region, "the cluster", location_of(gke.context))


def _missing_of_cluster(cluster: Cluster) -> list[str]:
    missing = []
    try:
        cluster.call("the JobSet API", "CustomObjectsApi", "get_api_resources", GROUP, VERSION)
    except Absent:
        missing.append(f"it has no JobSets; install them: {JOBSET_HELP}")
    lacking = [
        f"{verb} {resource}" for verb, group, resource in NEEDED
        if not _may(cluster, verb, group, resource)
    ]  # fmt: skip
    if lacking:
        missing.append(
            f"this account may not {', '.join(lacking)} in namespace {cluster.gke.namespace}; give "
            "it the role roles/container.developer, or a Role of the namespace"
        )
    return missing


def _may(cluster: Cluster, verb: str, group: str, resource: str) -> bool:
    namespace = cluster.gke.namespace
    asked = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    method = "create_self_subject_access_review"
    return cluster.call("permissions", "AuthorizationV1Api", method, review).status.allowed


def _objects(cluster: Cluster) -> list[tuple[tuple[str, str], str]]:
    """Objects that the manifest names, as (kind, name), with the sentence for their absence."""
    gke, place = cluster.gke, f"namespace {cluster.gke.namespace}"
    make = f"kubectl -n {gke.namespace} create"
    missing = {
        ("namespace", gke.namespace): f"it has no {place}; name another by --namespace, or make "
        f"it: kubectl create namespace {gke.namespace}",
        ("account", gke.account): f"{place} has no service account {gke.account} (--pod-account); "
        f"make it: {make} serviceaccount {gke.account}, and let it write to the bucket",
        ("queue", gke.queue): f"{place} has no local queue {gke.queue} of Kueue; correct or leave "
        "out --queue",
    }
    for pair in cluster.cloud.secrets:
        secret = pair.partition("=")[2].partition("/")[0]
        missing["secret", secret] = (
            f"{place} has no secret {secret} (--secret); make it: {make} secret generic {secret} "
            "--from-file=KEY=FILE"
        )
    return [(named, problem) for named, problem in missing.items() if named[1]]


def _look(cluster: Cluster, named: tuple[str, str]) -> str:
    """A note where it is not known whether an object is there. Raises Absent where it is not."""
    (kind, name), namespace = named, cluster.gke.namespace
    words: tuple[Any, ...] = (name, namespace)
    options: dict[str, Any] = {}
    api = "CoreV1Api"
    match kind:
        case "namespace":
            method, words = "read_namespace", (name,)
        case "account":
            method = "read_namespaced_service_account"
        case "queue":
            api, method = "CustomObjectsApi", "get_namespaced_custom_object"
            words = (*KUEUE, namespace, "localqueues", name)
        case _:
            method = "read_namespaced_secret"
            options = {"_headers": {"Accept": METADATA_ONLY}}  # without what is in it
    try:
        cluster.call(f"{kind} {name}", api, method, *words, **options)
    except Refused:
        return f"it is not known whether {kind} {name} is there: this account may not look"
    return ""


def _nodes(cluster: Cluster, offer: Offer) -> list[str]:
    """Notes on the nodes that an offer needs. Raises UserError where they can never fit."""
    wanted = selector(offer, cluster.cloud)
    text = ", ".join(f"{key}={value}" for key, value in wanted.items())
    try:
        chosen = f"{ACCELERATOR}={offer.accelerator_type},{TOPOLOGY}={offer.topology}"
        told = cluster.call("the nodes", "CoreV1Api", "list_node", label_selector=chosen).items
    except Refused:
        return [f"it is not known whether there are nodes for {offer.name} ({text}): this account "
                "may not list nodes"]  # fmt: skip
    fitting = [node for node in told if wanted.items() <= (node.metadata.labels or {}).items()]
    chips = Counter(int((node.status.allocatable or {}).get(CHIPS, 0)) for node in fitting)
    needed = chips_per_host(offer)
    if fitting and needed not in chips:
        raise UserError(
            f"--slice: {offer.name}: needs nodes with {needed} chips, and those of "
            f"{offer.topology} have {', '.join(map(str, sorted(chips)))}; add a node pool of such "
            "machines"
        )
    if chips[needed] >= offer.hosts:
        spot = all((node.metadata.labels or {}).get(SPOT) == "true" for node in fitting)
        told_spot = "the nodes are spot, and priced as on demand here; add --spot"
        return [told_spot] if spot and SPOT not in wanted else []
    others = " (there are others, which --spot or --reservation excludes)"
    others = others if told and not fitting else ""
    return [
        f"{chips[needed]} of the {offer.hosts} nodes for {offer.name} are there{others}; it is "
        f"unknown whether a node pool or autoprovisioning can add some with {text}"
    ]
