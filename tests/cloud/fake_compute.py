"""A stand-in for Compute Engine on loopback, and for the tools that a VM uses on its disks.

A disk is a folder. A VM is a process that runs the startup script of its metadata beside a metadata
server of its own; mkfs.ext4, blkid, mount, umount, mountpoint and poweroff are scripts that do the
same to folders, and write their words down.
"""

import json
import os
import re
import shutil
import threading
from urllib.parse import parse_qs, urlsplit

from tests.cloud.fake_tpu import TOKEN, Host, Server, refused

ZONES = ("us-central2-b", "us-east5-a")
TOOLS = {
    "mkfs.ext4": 'for disk; do :; done; mkdir "$disk/lost+found"',
    "blkid": 'for disk; do :; done; [ -d "$disk/lost+found" ] && echo ext4 || exit 2',
    "mount": """dir=$4; [ -d "$3/lost+found" ] || { echo "$3: unknown filesystem" >&2; exit 32; }
[ -e "$3/broken" ] && { echo "$3: can't read superblock" >&2; exit 32; }
rmdir "$dir" && ln -s "$(readlink -f "$3")" "$dir" """,
    "umount": 'rm "$1" && mkdir "$1"',
    "mountpoint": '[ -L "$2" ]',
    "poweroff": "exit 0",
}


class FakeCompute:
    """The service; `disks` and `instances` by (zone, name)."""

    def __init__(self, home, variables=None):
        self.home, self.only_here = home, set()
        self.resources = {"disks": {}, "instances": {}}
        self.hosts, self.calls, self.bodies = {}, [], []
        self.allowed, self.may_delete, self.full = True, True, False
        self.play, self.known = self.boot, {}  # what a VM does with its metadata; requests by id
        self.failing = []  # HTTP codes of the next answers
        self._lock = threading.RLock()
        self.server = Server(self.answer)
        self.bin, self.said = home / "bin", home / "tools"
        self.bin.mkdir(parents=True)
        for name, script in TOOLS.items():
            path = self.bin / name
            path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.said}\n{script}\n')
            path.chmod(0o755)
        (home / "dev" / "by-id").mkdir(parents=True)
        self.variables = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "LMWRIGHT_DISKS": str(home / "mnt"),
            "LMWRIGHT_DEVICES": str(home / "dev"),
            **(variables or {}),
        }

    @property
    def disks(self):
        return self.resources["disks"]

    @property
    def instances(self):
        return self.resources["instances"]

    def folder(self, name):
        """What is on a disk."""
        return self.home / "disks" / name

    def console(self, name):
        """What a VM has printed, at all its boots."""
        logs = self.home.glob(f"vms/{name}.*/console.log")
        return "".join(log.read_text() for log in sorted(logs))

    def tools(self):
        return self.said.read_text().splitlines() if self.said.exists() else []

    def answer(self, method, path, body, headers):
        parts = urlsplit(path)
        where = re.fullmatch(
            r"/compute/v1/projects/([^/]+)/zones/([^/]+)(?:/(\w+)(?:/([^/]+)(?:/(\w+))?)?)?",
            parts.path,
        )
        if not where:
            return refused(404, "NOT_FOUND", f"no such path {path}")
        _, zone, kind, name, verb = where.groups()
        with self._lock:
            self.calls.append((method, kind, name, verb))
            if self.failing:
                return refused(self.failing.pop(0), "UNAVAILABLE", "try again")
            if not self.allowed:
                return refused(403, "PERMISSION_DENIED", "Required 'compute.disks.create'")
            if zone not in ZONES:
                return refused(404, "NOT_FOUND", f"zone {zone} was not found")
            if kind is None:
                return 200, {"name": zone}
            if kind == "operations":
                return 200, {"name": name, "status": "DONE"}
            from_vm = headers.get("Authorization") == f"Bearer {TOKEN}"
            if method == "DELETE" and from_vm and not self.may_delete:
                return refused(403, "PERMISSION_DENIED", "Required 'compute.instances.delete'")
            words, query = json.loads(body) if body else {}, parse_qs(parts.query)
            if (id := query.get("requestId", [""])[0]) not in self.known or not id:
                self.known[id] = self._do(method, zone, kind, name, verb, words, query)
            return self.known[id]

    def _do(self, method, zone, kind, name, verb, words, query):
        there = self.resources[kind]
        if method == "GET" and name is None:
            label = query["filter"][0].removeprefix("labels.").removesuffix(":*")
            items = [self._shown(kind, *key) for key in there if key[0] == zone]
            return 200, {"items": [item for item in items if label in item.get("labels", {})]}
        if method == "POST" and name is None:
            return self._make(zone, kind, words)
        if (zone, name) not in there:
            return refused(404, "NOT_FOUND", f"The resource '{name}' was not found")
        if verb == "serialPort":
            return 200, {"contents": self.console(name)}
        if method == "GET":
            return 200, self._shown(kind, zone, name)
        if method == "DELETE":
            return self._delete(zone, kind, name)
        if verb == "setLabels":
            if words["labelFingerprint"] != there[zone, name]["labelFingerprint"]:
                return refused(412, "CONDITION_NOT_MET", "Labels fingerprint")
            words = {"labels": words["labels"]}
        there[zone, name] |= words
        return self._operation(name)

    def _make(self, zone, kind, words):
        name = words["name"]
        self.bodies.append(words)
        if (zone, name) in self.resources[kind]:
            return refused(409, "ALREADY_EXISTS", f"The resource '{name}' already exists")
        if kind == "disks":
            words |= {"id": str(len(self.bodies)), "labelFingerprint": "x", "status": "READY"}
            self.disks[zone, name] = words
            self.folder(name).mkdir(parents=True)
            return self._operation(name)
        if self.full:
            return self._operation(
                name, {"errors": [{"code": "QUOTA_EXCEEDED", "message": "Quota 'CPUS' exceeded."}]}
            )
        self.instances[zone, name] = words
        for disk in words["disks"][1:]:
            source = disk["source"].rpartition("/")[2]
            (self.home / "dev" / "by-id" / f"google-{disk['deviceName']}").symlink_to(
                self.folder(source)
            )
        metadata = {item["key"]: item["value"] for item in words["metadata"]["items"]}
        if (host := self.play(zone, name, metadata)) is not None:
            self.hosts[zone, name] = host
        return self._operation(name)

    def boot(self, zone, name, metadata):
        """A VM as a process."""
        return Host(_In(self), metadata, zone, f"{name}.{len(self.bodies)}", 0, 0, 1)

    def _delete(self, zone, kind, name):
        if kind == "instances":
            if host := self.hosts.pop((zone, name), None):
                host.end()
            for disk in self.instances[zone, name]["disks"][1:]:
                (self.home / "dev" / "by-id" / f"google-{disk['deviceName']}").unlink()
                mounted = self.home / "mnt" / disk["deviceName"]
                if mounted.is_symlink():
                    mounted.unlink()
                    mounted.mkdir()
        elif users := self._shown(kind, zone, name).get("users"):
            return refused(400, "RESOURCE_IN_USE", f"The disk is used by {users}")
        else:
            shutil.rmtree(self.folder(name))
        del self.resources[kind][zone, name]
        return self._operation(name)

    def _shown(self, kind, zone, name):
        item = self.resources[kind][zone, name]
        if kind == "disks":
            users = [
                vm["name"] for vm in self.instances.values()
                if any(disk.get("source", "").endswith(f"/{name}") for disk in vm["disks"])
            ]  # fmt: skip
            return item | ({"users": users} if users else {})
        host = self.hosts.get((zone, name))
        ended = host is not None and host.process.poll() is not None
        return item | {"status": "TERMINATED" if ended else "RUNNING"}

    def _operation(self, name, error=None):
        done = {"name": f"operation-{name}", "status": "RUNNING"}
        return 200, done | ({"status": "DONE", "error": error} if error else {})

    def end(self, zone, name):
        """The VM stops by itself, as at its time limit."""
        self.hosts[zone, name].end()

    def close(self):
        for host in self.hosts.values():
            host.end()
        self.server.shutdown()


class _In:
    """Where the VMs of a service live."""

    def __init__(self, service):
        self.home, self.variables = service.home / "vms", service.variables
        self.only_here = service.only_here
