"""A stand-in for the Kubernetes API of a GKE cluster on loopback, for the official client.

JobSets get pods, one state further for each time that they are looked at: unplaced, placed,
running. With `home`, the command of every running container is a process with the environment of
its pod, as GKE makes it; one that fails is started again. Tests take nodes away, fail pods, refuse,
lose answers and go away.
"""

import json
import os
import signal
import subprocess
import sysconfig
import threading
import time
from urllib.parse import parse_qs, urlsplit

from tests.cloud.fake_tpu import TOKEN, Server

GROUP = "/apis/jobset.x-k8s.io/v1alpha2"
CRASH_PAUSE_S = 1.0
NOW = "2026-11-24T07:00:00Z"
SPEC_FIELDS = {
    "replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend",
    "coordinator", "managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies",
}  # fmt: skip
JOB_FIELDS = {"name", "template", "replicas", "dependsOn", "groupName"}
NETWORK_FIELDS = {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
FAILURE_FIELDS = {"maxRestarts", "restartStrategy", "rules"}


class Quiet(Server):
    def serve_forever(self, poll_interval=0.02):
        super().serve_forever(poll_interval)

    def handle_error(self, request, client_address):
        """An answer that is lost on purpose, or a client that has gone."""


def check_job_set(manifest):
    """Why the API would not take a JobSet; empty if it would."""
    from kubernetes import client

    spec, told = manifest["spec"], []
    for fields, known in (
        (spec, SPEC_FIELDS), (spec.get("network", {}), NETWORK_FIELDS),
        (spec.get("failurePolicy", {}), FAILURE_FIELDS),
        *((job, JOB_FIELDS) for job in spec["replicatedJobs"]),
    ):  # fmt: skip
        told += [f"unknown field {name}" for name in fields.keys() - known]
    for job in spec["replicatedJobs"]:
        template = job["template"]["spec"]
        parsed = client.ApiClient().sanitize_for_serialization(client.V1JobSpec.from_dict(template))
        told += [f"unknown field of a Job {n}" for n in unknown(template, parsed)]
        last = f"{manifest['metadata']['name']}-{job['name']}-{job['replicas'] - 1}"
        if len(f"{last}-{template['completions'] - 1}-abcde") > 63:
            told.append("the names of its pods are too long")
    return ", ".join(told)


def unknown(given, parsed, place=""):
    """Fields that the client's models do not have."""
    if isinstance(given, dict):
        for name, value in given.items():
            if name not in parsed:
                yield f"{place}.{name}"
            elif name not in ("labels", "annotations", "nodeSelector", "limits", "requests"):
                yield from unknown(value, parsed[name], f"{place}.{name}")
    elif isinstance(given, list):
        for value, other in zip(given, parsed, strict=True):
            yield from unknown(value, other, place)


def status(code, message):
    reason = {404: "NotFound", 403: "Forbidden", 409: "AlreadyExists"}.get(code, "Invalid")
    return code, {"kind": "Status", "code": code, "reason": reason, "message": message}


class FakeGke:
    """The cluster. `pools` are its node pools: labels, chips of a node, number of nodes."""

    def __init__(self, home=None, variables=None):
        self.home, self.variables = home, variables or {}
        self.pools, self.job_sets, self.pods = {}, {}, {}
        self.calls, self.bodies, self.made = [], [], 0
        self.namespaces, self.accounts, self.queues = {"default"}, {"trainer"}, {"tpus"}
        self.secrets = {}
        self.has_job_sets = self.lists_nodes = True
        self.denied, self.lost, self.down, self.quota = set(), 0, False, ""
        self._lock = threading.RLock()
        self.server, self.metadata = Quiet(self.answer), Quiet(self.tell)

    def kubeconfig(self, path, *names):
        """Writes the user's configuration."""
        import yaml

        server = f"http://{self.server.address}"
        names = names or ("gke_p_us-central1-c_c",)
        path.write_text(yaml.dump({
            "apiVersion": "v1", "kind": "Config", "current-context": names[0],
            "clusters": [{"name": "x", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": "a-token-of-the-user"}}],
            "contexts": [{"name": n, "context": {"cluster": "x", "user": "u"}} for n in names],
        }))  # fmt: skip

    def add_pool(self, name, accelerator="tpu7x", topology="2x2x2", nodes=2, chips=4, **labels):
        self.pools[name] = {
            "labels": {
                "cloud.google.com/gke-tpu-accelerator": accelerator,
                "cloud.google.com/gke-tpu-topology": topology,
                "cloud.google.com/gke-nodepool": name,
            } | labels,
            "nodes": nodes, "chips": chips,
        }  # fmt: skip

    def answer(self, method, path, body, headers):
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        with self._lock:
            self.calls.append((method, parts.path, headers.get("Accept")))
            if self.down:
                return status(503, "the server is currently unable to handle the request")
            if headers.get("Authorization") != "Bearer a-token-of-the-user":
                return status(401, "Unauthorized")
            if parts.path.startswith(GROUP):
                return self._job_set(method, parts.path.removeprefix(GROUP), query, body)
            return self._core(method, parts.path, query, json.loads(body or "{}"), headers)

    def _core(self, method, path, query, body, headers):
        if path.endswith("/selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            allowed = f"{asked['verb']} {asked['resource']}" not in self.denied
            return 201, body | {"status": {"allowed": allowed}}
        if path == "/api/v1/nodes":
            if not self.lists_nodes:
                return status(403, "nodes is forbidden")
            wanted = dict(pair.split("=") for pair in query["labelSelector"].split(","))
            pools = [p for p in self.pools.values() if wanted.items() <= p["labels"].items()]
            items = [
                {"metadata": {"name": f"n{k}", "labels": pool["labels"]},
                 "status": {"allocatable": {"google.com/tpu": str(pool["chips"])}}}
                for pool in pools for k in range(pool["nodes"])
            ]  # fmt: skip
            return 200, {"kind": "NodeList", "apiVersion": "v1", "items": items}
        words = path.strip("/").split("/")
        name, kind = words[-1], words[-2]
        if kind == "secrets" and "PartialObjectMetadata" not in headers.get("Accept", ""):
            return status(403, "a secret was read")
        there = {"namespaces": self.namespaces, "serviceaccounts": self.accounts,
                 "localqueues": self.queues, "secrets": self.secrets}  # fmt: skip
        if name == "pods":
            self._advance()
            chosen = query["labelSelector"].partition("=")[2]
            pods = [p.shown() for p in self.pods.get(chosen, [])]
            return 200, {"kind": "PodList", "apiVersion": "v1", "items": pods}
        if name not in there.get(kind, ()):
            return status(404, f'{kind} "{name}" not found')
        return 200, {"apiVersion": "v1", "metadata": {"name": name}}

    def _job_set(self, method, path, query, body):
        if not self.has_job_sets:
            return status(404, "the server could not find the requested resource")
        if not path:
            verbs = ["create", "delete", "get", "list"]
            resource = {"name": "jobsets", "namespaced": True, "kind": "JobSet",
                        "singularName": "jobset", "verbs": verbs}  # fmt: skip
            return 200, {"groupVersion": GROUP[6:], "resources": [resource]}
        name = path.partition("jobsets")[2].strip("/")
        verb = {"POST": "create", "DELETE": "delete"}.get(method, "get" if name else "list")
        if f"{verb} jobsets" in self.denied:
            return status(403, f"jobsets is forbidden: User cannot {verb}")
        if verb == "create":
            return self._create(json.loads(body))
        if verb == "list":
            key, _, value = query["labelSelector"].partition("=")
            found = [j for j in self.job_sets.values() if j["metadata"]["labels"][key] == value]
            return 200, {"kind": "JobSetList", "items": found}
        if name not in self.job_sets:
            return status(404, f'jobsets "{name}" not found')
        self._advance()
        shown = self.job_sets[name]
        if verb == "delete":
            shown["metadata"]["deletionTimestamp"] = NOW
            for pod in self.pods[name]:
                pod.end(5.0)
        elif "deletionTimestamp" in shown["metadata"]:
            del self.job_sets[name], self.pods[name]  # seen once more, then gone
        return 200, shown

    def _create(self, manifest):
        name = manifest["metadata"]["name"]
        self.bodies.append(manifest)
        if told := check_job_set(manifest):
            return status(422, told)
        if name in self.job_sets:
            return status(409, f'jobsets "{name}" already exists')
        if self.quota:
            return status(403, f'jobsets "{name}" is forbidden: exceeded quota: {self.quota}')
        self.job_sets[name] = manifest | {"status": {}}
        job = manifest["spec"]["replicatedJobs"][0]
        hosts = job["template"]["spec"]["completions"]
        self.pods[name] = [
            Pod(self, manifest, k, worker)
            for k in range(job["replicas"])
            for worker in range(hosts)
        ]
        if self.lost:
            self.lost -= 1
            raise ConnectionAbortedError
        return 201, manifest

    def _advance(self):
        """One state further, as far as there are nodes."""
        for name, pods in self.pods.items():
            shown = self.job_sets[name]
            if "deletionTimestamp" in shown["metadata"]:
                continue
            for pod in pods:
                pod.look()
            if all(pod.phase == "Succeeded" for pod in pods):
                shown["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}

    def pool_for(self, pod):
        """The node pool of a pod's slice, or one that is free and fits."""
        every = [other for pods in self.pods.values() for other in pods if other.pool]
        for other in every:
            if other.slice_key == pod.slice_key:
                return other.pool
        taken, chips = {other.pool for other in every}, int(pod.limits["google.com/tpu"])
        for name, pool in self.pools.items():
            fits = pod.spec["nodeSelector"].items() <= pool["labels"].items()
            if fits and pool["chips"] == chips and name not in taken and pool["nodes"] >= pod.hosts:
                return name
        return None

    def preempt(self, name, grace_s=0.0):
        """Takes a node pool away; the pods on it are made again, and wait for another."""
        with self._lock:
            self.pools.pop(name)
            for pods in self.pods.values():
                for k, pod in enumerate(pods):
                    if pod.pool == name:
                        pod.end(grace_s)
                        pods[k] = Pod(self, pod.manifest, pod.slice_index, pod.worker)

    def running(self):
        """Pods whose container is a process."""
        with self._lock:
            every = [pod for pods in self.pods.values() for pod in pods]
            return [pod for pod in every if pod.process and pod.process.poll() is None]

    def tell(self, _method, path, _body, headers):
        """The metadata server of all pods."""
        if headers.get("Metadata-Flavor") == "Google" and path.endswith("/default/token"):
            return 200, json.dumps({"access_token": TOKEN})
        return 404, ""

    def close(self):
        for pods in self.pods.values():
            for pod in pods:
                pod.end(0.0)
        self.server.shutdown()
        self.metadata.shutdown()


class Pod:
    """A pod of a JobSet, and its container's process."""

    def __init__(self, cluster, manifest, slice_index, worker):
        self.cluster, self.manifest = cluster, manifest
        self.slice_index, self.worker = slice_index, worker
        cluster.made += 1
        self.job_set, job = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]
        self.slice_key = self.job_set, slice_index
        self.host = f"{self.job_set}-{job['name']}-{slice_index}-{worker}"
        self.name = f"{self.host}-{cluster.made:05d}"
        self.num_slices, self.hosts = job["replicas"], job["template"]["spec"]["completions"]
        template = job["template"]["spec"]["template"]
        self.spec, [self.container] = template["spec"], template["spec"]["containers"]
        self.limits = self.container["resources"]["limits"]
        self.labels = template["metadata"]["labels"] | {
            "jobset.sigs.k8s.io/jobset-name": self.job_set,
            "jobset.sigs.k8s.io/job-index": str(slice_index),
            "batch.kubernetes.io/job-completion-index": str(worker),
        }
        self.phase, self.pool, self.process, self.again, self.restarts = (
            "Pending",
            None,
            None,
            None,
            0,
        )
        self.state, self.last = {"waiting": {"reason": "ContainerCreating"}}, {}

    def look(self):
        """One state further."""
        if self.pool is None:
            self.pool = self.cluster.pool_for(self)
        elif self.phase == "Pending" or (self.again and time.monotonic() > self.again):
            self._start()
        elif self.process is not None and self.process.poll() is not None:
            self._ended(self.process.poll())

    def _start(self):
        missing = self._missing_secret()
        if missing:
            told = f'secret "{missing}" not found'
            self.state = {"waiting": {"reason": "CreateContainerConfigError", "message": told}}
            return
        self.phase, self.state, self.again = "Running", {"running": {"startedAt": NOW}}, None
        if self.cluster.home is not None:
            self._run()

    def _missing_secret(self):
        for entry in self.container["env"]:
            wanted = entry.get("valueFrom", {}).get("secretKeyRef")
            if wanted and wanted["key"] not in self.cluster.secrets.get(wanted["name"], {}):
                return wanted["name"]
        return ""

    def _ended(self, code):
        ended = {"terminated": {"exitCode": code, "message": self.log.read_text()[-2000:]}}
        if code == 0:
            self.phase, self.state, self.process = "Succeeded", ended, None
        else:
            self.last, self.restarts, self.process = ended, self.restarts + 1, None
            self.state = {"waiting": {"reason": "CrashLoopBackOff"}}
            self.again = time.monotonic() + CRASH_PAUSE_S

    def variables(self):
        """Environment of the container, by the manifest and by GKE's webhook."""
        known = {"status.podIP": "127.0.0.1"}
        known |= {f"metadata.labels['{name}']": value for name, value in self.labels.items()}
        variables = {"JOB_COMPLETION_INDEX": str(self.worker), "TPU_WORKER_ID": str(self.worker)}
        hosts = [
            f"{self.host[: -len(str(self.worker))]}{k}.{self.job_set}" for k in range(self.hosts)
        ]
        variables["TPU_WORKER_HOSTNAMES"] = ",".join(hosts)
        for entry in self.container["env"]:
            value = entry.get("value")
            if source := entry.get("valueFrom"):
                field, secret = source.get("fieldRef"), source.get("secretKeyRef")
                value = known[field["fieldPath"]] if field else None
                value = self.cluster.secrets[secret["name"]][secret["key"]] if secret else value
            variables[entry["name"]] = value
        # the cluster's name service: every pod is on loopback
        ending = f".{self.job_set}"
        return {k: "127.0.0.1" if v.endswith(ending) and "," not in v else v
                for k, v in variables.items()}  # fmt: skip

    def _run(self):
        home = self.cluster.home / self.name
        home.mkdir(parents=True, exist_ok=True)
        self.log = home / "console.log"
        keep = ("PATH", "STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL", "GOOGLE_CLOUD_PROJECT",
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "NO_GCE_CHECK", "LANG")  # fmt: skip
        variables = {name: os.environ[name] for name in keep if name in os.environ}
        variables |= self.cluster.variables | self.variables() | {
            "GCE_METADATA_HOST": self.cluster.metadata.address,
            "LMWRIGHT_HOME": str(home / "opt"),
            "HOME": str(home),
            # The packages of this environment, but for lmwright itself: that comes by its wheel.
            "PYTHONPATH": sysconfig.get_paths()["purelib"],
        }  # fmt: skip
        (home / "opt").mkdir(exist_ok=True)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.container["command"], env=variables, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True, cwd=home,
            )  # fmt: skip

    def end(self, grace_s):
        """Ends the container's process, which is asked first if there is time."""
        if self.process is None or self.process.poll() is not None:
            return
        if grace_s:
            self.process.send_signal(signal.SIGTERM)
            end = time.monotonic() + grace_s
            while self.process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def shown(self):
        container = {"name": "host", "image": self.container["image"], "imageID": "", "ready": True,
                     "restartCount": self.restarts, "state": self.state,
                     "lastState": self.last}  # fmt: skip
        metadata = {"name": self.name, "labels": self.labels, "creationTimestamp": NOW}
        spec = {"containers": [{"name": "host"}], **({"nodeName": self.pool} if self.pool else {})}
        return {"metadata": metadata, "spec": spec,
                "status": {"phase": self.phase, "containerStatuses": [container]}}  # fmt: skip
