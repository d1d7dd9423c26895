"""Cluster: JobSets of a Kubernetes cluster in the place of queued resources.

    JobSet not there           GONE                     being deleted     DELETING
    suspended, pods unplaced   WAITING_FOR_RESOURCES    pods placed       PROVISIONING
    all pods run or are done   ACTIVE                   failed            FAILED
    image, secret or bucket refused                                       HOPELESS

A pod whose node is lost is made again by the cluster: its slice is REPAIRING until all run again.
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from lmwright.cloud.gke.context import GET_CREDENTIALS, connect
from lmwright.cloud.gke.manifest import (
    GROUP,
    JOB,
    JOB_ID,
    JOB_INDEX,
    JOBSET_NAME,
    PLURAL,
    POD_INDEX,
    VERSION,
    job_id,
    job_set,
)
from lmwright.cloud.service import Away, Node, Request, Scarce
from lmwright.cloud.spec import Cloud, Offer
from lmwright.errors import ERROR, EXIT_USER_ERROR, UserError, first_line

TIMEOUT_S = (10.0, 60.0)  # to connect, and for the answer
STUCK = ("ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError")
STUCK_S = 600.0  # registries throttle, and the node's cache of secrets may be late
IN_VAIN = re.compile(
    "not found|not exist|find key|manifest unknown|denied|[Uu]nauthorized|Forbidden|no match for"
)
RUNNING = ("Running", "Succeeded")


class Absent(Exception):
    """There is no such object."""


class Taken(Exception):
    """There is such an object already."""


class Refused(UserError):
    """The account lacks a permission."""


class Cluster:
    """The JobSets of one job. `cloud` says where, and the job's URL which are its own."""

    def __init__(self, cloud: Cloud, url: str):
        assert cloud.gke is not None
        self.cloud, self.gke, self._id = cloud, cloud.gke, job_id(url)
        self._client = connect(self.gke.context)

    def create(self, id: str, job: str, offer: Offer, metadata: dict[str, str]) -> None:
        """Makes a JobSet; done already if this job has it. Raises UserError where another has."""
        manifest = job_set(self.cloud, id, job, offer, metadata)
        try:
            self._jobsets("create", manifest)
        except Taken:
            there = self._get(id)
            if there is None or "deletionTimestamp" in there["metadata"]:
                raise Away(f"JobSet {id}: an older one of this name is being deleted") from None
            if _label(there, JOB_ID) != self._id:
                raise UserError(
                    f"--name: namespace {self.gke.namespace} already has a JobSet {id} that is not "
                    "yours; choose another name"
                ) from None

    def request(self, zone: str, id: str) -> Request:
        """Status of a JobSet."""
        there = self._get(id)
        if there is None:
            return Request(id, "GONE")
        return Request(id, *self._state(there), _label(there, JOB))

    def requests(self, zone: str) -> list[Request]:
        """All JobSets of this job."""
        found = self._jobsets("list", label_selector=f"{JOB_ID}={self._id}")["items"]
        return [self.request(zone, entry["metadata"]["name"]) for entry in found]

    def nodes(self, zone: str, id: str, num_slices: int) -> list[Node]:
        """The slices of a JobSet."""
        there = self._get(id)
        if there is None:
            return []
        pods = self.pods(id)
        job = there["spec"]["replicatedJobs"][0]["template"]["spec"]
        slices = []
        for index in range(num_slices):
            up = [_runs(pods.get((index, worker))) for worker in range(job["completions"])]
            state = "READY" if all(up) or _condition(there, "Completed") else "REPAIRING"
            told = "HEALTHY" if state == "READY" else f"({sum(up)} of {len(up)} pods run)"
            slices.append(Node(f"{id} slice {index}", state, told, ""))
        return slices

    def delete(self, zone: str, id: str) -> None:
        """Deletes a JobSet, which is there until its pods are gone."""
        try:
            self._jobsets("delete", name=id, propagation_policy="Foreground")
        except Absent:
            return

    def pods(self, id: str) -> dict[tuple[int, int], Any]:
        """The newest pod of each host of a JobSet, by its slice and its number there."""
        chosen = f"{JOBSET_NAME}={id}"
        told = self.call(
            "the pods", "CoreV1Api", "list_namespaced_pod", self.gke.namespace,
            label_selector=chosen,
        )  # fmt: skip
        pods: dict[tuple[int, int], Any] = {}
        for pod in sorted(told.items, key=lambda pod: str(pod.metadata.creation_timestamp)):
            labels = (pod.metadata.labels or {}) | (pod.metadata.annotations or {})
            place = int(labels.get(JOB_INDEX, 0)), int(labels.get(POD_INDEX, 0))
            if place not in pods or not _runs(pods[place]):
                pods[place] = pod
        return pods

    def call(self, thing: str, api: str, method: str, *words: Any, **options: Any) -> Any:
        """Answer of the API. Raises Absent, Taken, Refused, Scarce, Away or UserError."""
        from kubernetes import client
        from urllib3.exceptions import HTTPError

        for again in (True, False):
            asked = getattr(getattr(client, api)(self._client), method)
            try:
                return asked(*words, _request_timeout=TIMEOUT_S, **options)
            except client.ApiException as error:
                if error.status == 401 and again:  # a token that has expired
                    self._client = connect(self.gke.context)
                    continue
                raise self._sentence(thing, error) from error
            except (HTTPError, OSError) as error:
                raise Away(
                    f"{thing}: cluster {self.gke.context} is not reached "
                    f"({type(error).__name__}); check the network"
                ) from error
        raise AssertionError

    def _sentence(self, thing: str, error: Any) -> Exception:
        reason, where = _message(error), f"cluster {self.gke.context}"
        if error.status == 404:
            return Absent(reason)
        if error.status == 409:
            return Taken(reason)
        if error.status == 401 or "system:anonymous" in reason:
            return UserError(f"{thing}: {where} takes no credentials from here; run: "
                             f"gcloud auth login, and {GET_CREDENTIALS}")  # fmt: skip
        if error.status == 403 and "exceeded quota" in reason:
            return Scarce(f"{thing}: {reason}")
        if error.status == 403:
            return Refused(f"{thing}: {where} refuses it ({reason}); the account needs the role "
                           "roles/container.developer, or a Role of the namespace")  # fmt: skip
        if error.status == 429 or (error.status or 500) >= 500:
            return Away(f"{thing}: {where} cannot answer now ({error.status} {reason})")
        return UserError(f"{thing}: {where} does not take it: {reason}; change what it names")

    def _jobsets(self, verb: str, *words: Any, name: str = "", **options: Any) -> Any:
        method = f"{verb}_namespaced_custom_object"
        place = (GROUP, VERSION, self.gke.namespace, PLURAL, *([name] if name else []))
        thing = f"JobSet {name}" if name else "the JobSets"
        return self.call(thing, "CustomObjectsApi", method, *place, *words, **options)

    def _get(self, id: str) -> dict[str, Any] | None:
        try:
            return self._jobsets("get", name=id)
        except Absent:
            return None

    def _state(self, jobset: Mapping[str, Any]) -> tuple[str, str]:
        """State and message of a JobSet that is there."""
        if "deletionTimestamp" in jobset["metadata"]:
            return "DELETING", ""
        if _condition(jobset, "Completed"):
            return "ACTIVE", ""
        pods = self.pods(jobset["metadata"]["name"])
        for pod in pods.values():
            if told := _hopeless(pod):
                return "HOPELESS", told
        if failed := _condition(jobset, "Failed"):
            return "FAILED", failed.get("message", "")
        slices = jobset["spec"]["replicatedJobs"][0]
        expected = slices["replicas"] * slices["template"]["spec"]["completions"]
        if sum(map(_runs, pods.values())) == expected:
            return "ACTIVE", ""
        placed = sum(bool(pod.spec.node_name) for pod in pods.values())
        return ("PROVISIONING" if placed == expected else "WAITING_FOR_RESOURCES"), ""


def _runs(pod: Any) -> bool:
    """True for a pod that runs or has done its work, and is not told to end."""
    going = pod is not None and pod.metadata.deletion_timestamp is None
    return going and pod.status.phase in RUNNING


def _hopeless(pod: Any) -> str:
    """Reason why a pod will never start; empty otherwise."""
    for status in pod.status.container_statuses or ():
        if status.state and status.state.running:
            continue
        waiting = status.state and status.state.waiting
        if waiting is not None and _is_stuck(pod, waiting):
            told = f"{waiting.reason}: {waiting.message or ''}".rstrip(": ")
            return f"pod {pod.metadata.name}: {told}; correct --image or --secret"
        for state in filter(None, (status.state, status.last_state)):
            ended = state.terminated
            if ended is not None and ended.exit_code == EXIT_USER_ERROR:
                lines = (ended.message or "").splitlines()
                told = next((line for line in reversed(lines) if ERROR in line), "exit code 2")
                return f"pod {pod.metadata.name}: {told.removeprefix(ERROR)}"
    return ""


def _is_stuck(pod: Any, waiting: Any) -> bool:
    """True for a container that waits for what does not come, by what the node says or for too
    long: the node itself tries again."""
    if waiting.reason == "InvalidImageName":
        return True
    began = pod.status.start_time
    lasted_s = (datetime.now(UTC) - began).total_seconds() if began else 0.0
    said = IN_VAIN.search(waiting.message or "") is not None
    return waiting.reason in STUCK and (said or lasted_s > STUCK_S)


def _condition(jobset: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """A condition of a JobSet, if it is true."""
    conditions = jobset.get("status", {}).get("conditions", ())
    return next((c for c in conditions if c["type"] == kind and c["status"] == "True"), None)


def _label(jobset: Mapping[str, Any], name: str) -> str:
    return jobset["metadata"].get("labels", {}).get(name, "")


def _message(error: Any) -> str:
    """Message of the API."""
    try:
        return json.loads(error.body)["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.reason or first_line(error)}"[:200]
