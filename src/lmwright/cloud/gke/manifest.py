"""Manifest: the JobSet of a job's slices, as the Kubernetes API takes it.

    JobSet j-1
      slice 0  Job j-1-slice-0   pods 0 .. hosts-1, one node pool
      slice 1  Job j-1-slice-1   pods 0 .. hosts-1, another one

A pod is a host: one container with all chips of its node and one agent, which starts the rank.
https://jobset.sigs.k8s.io, https://cloud.google.com/kubernetes-engine/docs/concepts/tpus
"""

import hashlib
from pathlib import Path
from typing import Any

from lmwright.cloud import identity
from lmwright.cloud.spec import Cloud, Gke, Offer

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
SLICE = "slice"
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
SPOT = "cloud.google.com/gke-spot"
RESERVATION = "cloud.google.com/reservation-name"
POOL = "cloud.google.com/gke-nodepool"
CHIPS = "google.com/tpu"
QUEUE = "kueue.x-k8s.io/queue-name"
JOBSET_NAME, JOB_INDEX = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/job-index"
POD_INDEX = "batch.kubernetes.io/job-completion-index"
JOB, JOB_ID = "lmwright-job", "lmwright-id"
ENTRY = Path(__file__).parent / "entry.py"
HOME = "/opt/lmwright"
PORT = 8476
GRACE_S = 90
"""Time for a pod that is told to end: the ranks save, at most a minute."""
CONTAINER_RESTARTS = 100
"""Restarts of a slice in all; then the JobSet fails, and its supervisor makes another."""
ALONE_S = 600
"""Time after its end at which the cluster deletes a JobSet that nobody has deleted."""


def job_id(url: str) -> str:
    """Label of a job's JobSets: names of jobs are not unique in a cluster."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def selector(offer: Offer, cloud: Cloud) -> dict[str, str]:
    """Labels of the nodes that an offer needs."""
    labels = {ACCELERATOR: offer.accelerator_type, TOPOLOGY: offer.topology}
    if cloud.capacity == "spot":
        labels[SPOT] = "true"
    if cloud.reservation:
        labels[RESERVATION] = cloud.reservation
    return labels


def chips_per_host(offer: Offer) -> int:
    """Chips of each node."""
    return offer.num_chips // offer.hosts


def job_set(
    cloud: Cloud, id: str, job: str, offer: Offer, metadata: dict[str, str]
) -> dict[str, Any]:
    """A JobSet. `metadata` has the job's URL and that of the code."""
    assert cloud.gke is not None
    gke, url = cloud.gke, metadata["lmwright-job"]
    own = {"app.kubernetes.io/managed-by": "lmwright", JOB: job, JOB_ID: job_id(url)}
    labels = dict(label.split("=", 1) for label in gke.labels) | own
    annotations = {f"alpha.{JOBSET_NAME.partition('/')[0]}/exclusive-topology": POOL}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "JobSet",
        "metadata": {
            "name": id,
            "namespace": gke.namespace,
            "labels": labels | ({QUEUE: gke.queue} if gke.queue else {}),
            # a slice of several hosts is a node pool; single hosts share theirs
            **({"annotations": annotations} if offer.hosts_per_slice > 1 else {}),
        },
        "spec": {
            "ttlSecondsAfterFinished": ALONE_S,
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {
                    "name": SLICE,
                    "replicas": offer.num_slices,
                    "template": {
                        "spec": {
                            "parallelism": offer.hosts_per_slice,
                            "completions": offer.hosts_per_slice,
                            "completionMode": "Indexed",
                            "backoffLimit": CONTAINER_RESTARTS,
                            "template": {
                                "metadata": {"labels": labels},
                                "spec": _pod(cloud, gke, id, offer, metadata),
                            },
                        }
                    },
                }
            ],
        },
    }


def _pod(cloud: Cloud, gke: Gke, id: str, offer: Offer, metadata: dict[str, str]) -> dict[str, Any]:
    chips = {CHIPS: str(chips_per_host(offer))}
    tolerated = [{"key": CHIPS, "operator": "Exists", "effect": "NoSchedule"}]
    if cloud.capacity == "spot":
        tolerated.append(
            {"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    return {
        "restartPolicy": "OnFailure",
        **({"serviceAccountName": gke.account} if gke.account else {}),
        "automountServiceAccountToken": False,  # the pods ask nothing of the cluster
        "terminationGracePeriodSeconds": GRACE_S,
        "nodeSelector": selector(offer, cloud),
        "tolerations": tolerated,
        "containers": [
            {
                "name": "host",
                "image": gke.image,
                "command": ["python3", "-c", ENTRY.read_text()],
                "env": _variables(cloud, id, offer, metadata),
                "ports": [{"containerPort": PORT}],
                "resources": {"limits": chips, "requests": chips},
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": [
                    {"name": "home", "mountPath": HOME},
                    {"name": "memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        # both outlive a container that starts again: what is installed, and checkpoints in memory
        "volumes": [
            {"name": "home", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _variables(
    cloud: Cloud, id: str, offer: Offer, metadata: dict[str, str]
) -> list[dict[str, Any]]:
    """Environment of a pod; secrets are named, and the cluster puts them in."""
    fixed = {
        identity.JOB_URL: metadata["lmwright-job"],
        identity.CODE: metadata["lmwright-code"],
        identity.INCARNATION: id,
        identity.LEADER: f"{id}-{SLICE}-0-0.{id}",
        identity.NUM_SLICES: str(offer.num_slices),
    }
    own = {
        identity.ADDRESS: "status.podIP",
        identity.SLICE_INDEX: f"metadata.labels['{JOB_INDEX}']",
    }
    variables: list[dict[str, Any]] = [{"name": name, "value": v} for name, v in fixed.items()]
    for name, path in own.items():
        variables.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    for pair in cloud.secrets:
        name, _, where = pair.partition("=")
        secret, _, key = where.partition("/")
        source = {"secretKeyRef": {"name": secret, "key": key}}
        variables.append({"name": name, "valueFrom": source})
    return variables
