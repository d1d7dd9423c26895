"""A stand-in for the Cloud TPU API on loopback, for Google's own client and for gcloud.

Requests go WAITING_FOR_RESOURCES -> PROVISIONING -> ACTIVE, one state for each time that they are
looked at. With `home`, every host of an active slice is a process that runs the startup script of
its metadata, beside a metadata server of its own. Tests preempt, fail and delete.
"""

import base64
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sysconfig
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

STATES = ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
ZONES = {"us-central2-b": ["v4-8", "v4-16", "v4-32"], "us-east5-a": ["v5litepod-16", "v4-16"]}
RUNTIMES = ["tpu-ubuntu2204-base", "v2-alpha-tpuv5-lite"]
MEMBER = "serviceAccount:12-compute@developer.gserviceaccount.com"
TOKEN = "a-token-of-the-metadata-server"


def once(fault, method="", kind="", times=1):
    """A fault of the next calls of a method on a kind of thing."""
    left = iter(range(times))

    def draw(by, what):
        meant = method in ("", by) and kind in ("", what)
        return fault if meant and next(left, None) is not None else None

    return draw


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answer):
        self.answer = answer
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self):
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        code, answer = self.server.answer(self.command, self.path, body, self.headers)
        if code == RESET:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Metadata-Flavor", "Google")
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = do_PATCH = reply


RESET = 0  # in place of an answer, the connection ends
BUSY = "The resource is being changed"
RATE = "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute' of service"
FAULTS = {
    "500": (500, "INTERNAL", "Internal error encountered"),
    "502": (502, "UNAVAILABLE", "Bad gateway"),
    "503": (503, "UNAVAILABLE", "The service is currently unavailable"),
    "504": (504, "DEADLINE_EXCEEDED", "Deadline expired"),
    "429": (429, "RESOURCE_EXHAUSTED", RATE),
    "409": (409, "ABORTED", BUSY),
    "400": (400, "FAILED_PRECONDITION", BUSY),
}
OF_DELETING = ("400",)  # what only a request to delete is told
DROPPED = ("reset", "lost")  # the connection ends before, or after the service has done it


def refused(code, status, message):
    return code, {"error": {"code": code, "status": status, "message": message}}


class FakeTpu:
    """The service; `resources` are its requests by (zone, id). `faults` is asked for the fault of
    each call, one of FAULTS or DROPPED, or None."""

    def __init__(self, home=None, variables=None, hosts_per_slice=2):
        self.home, self.variables, self.hosts = home, variables or {}, hosts_per_slice
        self.resources, self.calls, self.bodies = {}, [], []
        self.quota = dict.fromkeys(ZONES, True)
        self.allowed, self.speed, self.stuck = True, 1, set()
        self.nodes, self.running = {}, {}
        self.faults = lambda method, kind: None
        self.slow_deletes = 0  # looks at a request that is being deleted, before it is gone
        self.no_hosts = False
        self.asked = {}  # how often each request was made anew
        self.secrets, self.only_here = {}, set()  # variables that hosts do not have
        self.policy = {"bindings": [{"role": "roles/tpu.admin", "members": [MEMBER]}]}
        self._lock = threading.RLock()
        self.server = Server(self.answer)

    def answer(self, method, path, body, headers):
        if "/secrets/" in path:  # the secret manager
            name = path.split("/")[5]
            if headers.get("Authorization") != f"Bearer {TOKEN}" or name not in self.secrets:
                return refused(404, "NOT_FOUND", f"Secret {name} not found")
            return 200, {"payload": {"data": base64.b64encode(self.secrets[name]).decode()}}
        if path.startswith("/v1/projects/"):  # the resource manager
            return (200, {"projectNumber": "12"}) if method == "GET" else (200, self.policy)
        parts = urlsplit(path)
        where = re.fullmatch(
            r"/v2/projects/([^/]+)/locations/([^/]+)/(\w+)(?:/([^/:]+))?", parts.path
        )
        if not where:
            return refused(404, "NOT_FOUND", f"no such path {path}")
        project, zone, kind, id = where.groups()
        with self._lock:
            self.calls.append((method, kind, id or parse_qs(parts.query).get("queuedResourceId")))
            if not self.allowed:
                return refused(403, "PERMISSION_DENIED", "Permission 'tpu.nodes.create' denied")
            if zone not in ZONES:
                return refused(404, "NOT_FOUND", f"Location {zone} is not found")
            fault = self.faults(method, kind)
            if fault == "reset":
                return RESET, ""
            if fault in FAULTS:
                return refused(*FAULTS[fault])
            if fault == "lost":
                getattr(self, f"{method.lower()}_{kind}")(project, zone, id, parts.query, body)
                return RESET, ""
            return getattr(self, f"{method.lower()}_{kind}")(project, zone, id, parts.query, body)

    def get_acceleratorTypes(self, project, zone, *_):
        root = f"projects/{project}/locations/{zone}/acceleratorTypes"
        return 200, {"acceleratorTypes": [{"name": f"{root}/{t}", "type": t} for t in ZONES[zone]]}

    def get_runtimeVersions(self, project, zone, *_):
        root = f"projects/{project}/locations/{zone}/runtimeVersions"
        return 200, {"runtimeVersions": [{"name": f"{root}/{v}", "version": v} for v in RUNTIMES]}

    def post_queuedResources(self, project, zone, _id, query, body):
        query = parse_qs(query)
        id, resource = query["queuedResourceId"][0], json.loads(body)
        self.bodies.append(resource)
        if (zone, id) in self.resources:
            return refused(409, "ALREADY_EXISTS", f"Resource {id} already exists")
        if not self.quota[zone]:
            return refused(429, "RESOURCE_EXHAUSTED", "Quota limit 'TPUV4CoresPerProject' is 0")
        name = f"projects/{project}/locations/{zone}/queuedResources/{id}"
        resource |= {"name": name, "state": {"state": STATES[0]}, "seen": 0}
        self.resources[zone, id] = resource
        self.asked[zone, id] = self.asked.get((zone, id), 0) + 1
        return 200, self._operation(project, zone, id, shown(resource))

    def get_queuedResources(self, _project, zone, id, *_):
        if id is None:
            listed = [shown(r) for (where, _), r in self.resources.items() if where == zone]
            return 200, {"queuedResources": listed}
        resource = self.resources.get((zone, id))
        if resource is None:
            return refused(404, "NOT_FOUND", f"Resource {id} was not found")
        self._advance(zone, id, resource)
        return 200, shown(resource)

    def delete_queuedResources(self, project, zone, id, query, _body):
        if (zone, id) not in self.resources:
            return refused(404, "NOT_FOUND", f"Resource {id} was not found")
        self._end_hosts(zone, id)
        resource = self.resources[zone, id]
        if self.slow_deletes and resource["state"]["state"] != "DELETING":
            resource |= {"state": {"state": "DELETING"}, "left": self.slow_deletes}
        elif not self.slow_deletes:
            del self.resources[zone, id]
        return 200, self._operation(project, zone, id, None)

    def get_nodes(self, _project, zone, id, *_):
        for (where, resource_id), nodes in self.nodes.items():
            if where == zone and id in nodes and (zone, resource_id) in self.resources:
                return 200, nodes[id]
        return refused(404, "NOT_FOUND", f"Resource {id} was not found")

    def get_operations(self, project, zone, id, *_):
        return 200, self._operation(project, zone, id, {})

    def _operation(self, project, zone, id, response):
        kind = "google.protobuf.Empty" if response is None else "google.cloud.tpu.v2.QueuedResource"
        packed = {"@type": f"type.googleapis.com/{kind}"} | (response or {"value": {}})
        name = f"projects/{project}/locations/{zone}/operations/{id}"
        return {"name": name, "done": True, "response": packed}

    def _advance(self, zone, id, resource):
        state = resource["state"]["state"]
        if state == "DELETING":
            resource["left"] -= 1
            if resource["left"] <= 0:
                del self.resources[zone, id]
        if state not in STATES[:2] or zone in self.stuck:
            return
        resource["seen"] += 1
        if resource["seen"] % self.speed == 0:
            resource["state"]["state"] = STATES[STATES.index(state) + 1]
        if resource["state"]["state"] == "ACTIVE":
            self._make_nodes(zone, id, resource)

    def _make_nodes(self, zone, id, resource):
        spec = resource["tpu"]["nodeSpec"][0]
        several = spec.get("multisliceParams")
        names = [spec.get("nodeId", id)]
        if several:
            names = [f"{several['nodeIdPrefix']}-{k}" for k in range(several["nodeCount"])]
        ends = [{"ipAddress": f"10.0.0.{k}"} for k in range(self.hosts)]
        for name in names:
            node = {"name": name, "state": "READY", "health": "HEALTHY", "networkEndpoints": ends}
            self.nodes.setdefault((zone, id), {})[name] = node
        if self.home is not None and not self.no_hosts:
            self.running[zone, id] = [
                Host(self, spec["node"]["metadata"], zone, f"{name}-{w}", w, k, len(names))
                for k, name in enumerate(names)
                for w in range(self.hosts)
            ]

    def _end_hosts(self, zone, id):
        for host in self.running.pop((zone, id), []):
            host.end()
        self.nodes.pop((zone, id), None)

    def preempt(self, zone, id, state="SUSPENDED"):
        """Takes a slice away, as spot slices are."""
        with self._lock:
            for host in self.running.pop((zone, id), []):
                host.end()
            for node in self.nodes.get((zone, id), {}).values():
                node["state"] = "PREEMPTED"
            self.resources[zone, id]["state"] = {"state": state}

    def active(self):
        """(zone, id) of the requests that have their slices."""
        with self._lock:
            return [k for k, r in self.resources.items() if r["state"]["state"] == "ACTIVE"]

    def close(self):
        for zone, id in list(self.running):
            self._end_hosts(zone, id)
        self.server.shutdown()


def shown(resource):
    return {name: value for name, value in resource.items() if name not in ("seen", "left")}


class Host:
    """A host: a metadata server, and the startup script in a session of its own."""

    def __init__(self, service, metadata, zone, name, worker, slice_index, num_slices):
        self.metadata, self.event, self.preempted = metadata, "NONE", "FALSE"
        env = f"WORKER_ID: '{worker}'\nNODE_ID: '{name}'\n"
        if num_slices > 1:
            env += f"MEGASCALE_SLICE_ID: '{slice_index}'\nMEGASCALE_NUM_SLICES: '{num_slices}'\n"
            env += "MEGASCALE_COORDINATOR_ADDRESS: '127.0.0.1'\n"
        self.values = {
            "attributes/tpu-env": env,
            "network-interfaces/0/ip": "127.0.0.1",
            "zone": f"projects/12/zones/{zone}",
            "project-id": "p",
            "service-accounts/default/token": json.dumps({"access_token": TOKEN}),
        }
        self.asked = []
        self.server = Server(self.answer)
        home = service.home / name
        home.mkdir(parents=True)
        (home / "startup.sh").write_text(metadata["startup-script"])
        known = {k: v for k, v in os.environ.items() if k not in service.only_here}
        variables = {
            **known,
            **service.variables,
            "GCE_METADATA_HOST": self.server.address,
            "LMWRIGHT_HOME": str(home / "opt"),
            "HOME": str(home),
            # The packages of this environment, but for lmwright itself: that comes by its wheel.
            "PYTHONPATH": sysconfig.get_paths()["purelib"],
        }
        with open(home / "console.log", "ab") as log:
            self.process = subprocess.Popen(
                ["bash", str(home / "startup.sh")],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def answer(self, _method, path, _body, headers):
        key = path.removeprefix("/computeMetadata/v1/").removeprefix("instance/")
        key = key.removeprefix("project/")
        self.asked.append(key)
        if headers.get("Metadata-Flavor") != "Google":
            return 403, ""
        values = {"maintenance-event": self.event, "preempted": self.preempted, **self.values}
        values |= {f"attributes/{name}": value for name, value in self.metadata.items()}
        return (200, values[key]) if key in values else (404, "")

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.server.shutdown()
