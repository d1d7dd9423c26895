"""Requests to Compute Engine: those of gcloud, errors, and what a VM is asked for."""

import json
import os
import shutil
import subprocess

import pytest

from lmwright.cloud import compute_api, vm
from lmwright.cloud.compute_api import Compute, Refused
from lmwright.cloud.spec import Cloud
from lmwright.cloud.tpu_api import NO_CREDENTIALS
from lmwright.errors import UserError
from tests.cloud.fake_tpu import Server, refused

ZONE = "us-central2-b"
ACCOUNT = "me@p.iam.gserviceaccount.com"
DONE = {"name": "op", "status": "DONE", "kind": "compute#operation"}
MADE = vm.Vm(
    name="x", zone=ZONE, cloud=Cloud(project="p", service_account=ACCOUNT), role="fill",
    task="true", machine_type="e2-micro", code="gs://b/code", disks=("wiki",),
    boot_gib=20, most_s=3600,
)  # fmt: skip


class Heard:
    """A service that hears all and answers with what it is given."""

    def __init__(self):
        self.requests, self.answers = [], []
        self.server = Server(self.answer)

    def answer(self, method, path, body, _headers):
        self.requests.append((method, path.partition("?")[0], path, body))
        root = f"http://{self.server.address}/compute/v1/projects/p/zones/{ZONE}"
        links = {"selfLink": f"{root}/operations/op", "targetLink": f"{root}/instances/x"}
        return self.answers.pop(0) if self.answers else (200, DONE | links)

    def bodies(self):
        """Requests that change something, with names in the place of URLs."""
        root = f"http://{self.server.address}/compute/v1/"
        return [
            (method, path, body.decode().replace(root, ""))
            for method, path, _, body in self.requests if body
        ]  # fmt: skip


@pytest.fixture
def heard(monkeypatch):
    service = Heard()
    monkeypatch.setenv(compute_api.ENDPOINT, f"http://{service.server.address}/compute/v1/")
    monkeypatch.setenv(NO_CREDENTIALS, "true")
    monkeypatch.setattr(compute_api, "PAUSE_S", 0.001)
    yield service
    service.server.shutdown()


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
@pytest.mark.slow  # gcloud takes seconds for each call
def test_gcloud_asks_for_the_same(heard, tmp_path):
    place = ["--project", "p", "--zone", ZONE, "--quiet"]
    disk = "--disk=name=wiki,device-name=wiki,mode=rw,auto-delete=no"
    image = f"--image={vm.IMAGE}"
    create = ["instances", "create", "x", disk, image, "--machine-type=e2-micro", "--async"]
    create += ["--max-run-duration=3600s", "--instance-termination-action=DELETE"]
    create += [
        "--boot-disk-size=20GB",
        "--boot-disk-type=pd-balanced",
        "--labels=lmwright-role=fill",
    ]
    create += ["--scopes=cloud-platform", f"--service-account={ACCOUNT}"]
    many = ["disks", "update", "wiki", "--access-mode=READ_ONLY_MANY"]
    variables = os.environ | {"CLOUDSDK_CONFIG": str(tmp_path)}
    for words in (create, many):
        subprocess.run(["gcloud", "compute", *words, *place], env=variables, capture_output=True)
    theirs = [(method, path, json.loads(body)) for method, path, body in heard.bodies()]
    heard.requests.clear()
    vm.make(Compute("p"), MADE)
    Compute("p").change(ZONE, "disks", "wiki", "", {"name": "wiki", "accessMode": "READ_ONLY_MANY"})
    ours = [(method, path, json.loads(body)) for method, path, body in heard.bodies()]
    for (*request, body), (*other, asked) in zip(ours, theirs, strict=True):
        assert request == other
        body.pop("metadata", None)
        differs = _missing(body, asked)
        assert not differs, differs


def _missing(ours, theirs, path=""):
    """What of `ours` gcloud does not say."""
    if isinstance(ours, dict):
        return [m for k, v in ours.items() for m in _missing(v, theirs.get(k), f"{path}.{k}")]
    if isinstance(ours, list):
        pairs = zip(ours, theirs, strict=True)
        return [m for k, (a, b) in enumerate(pairs) for m in _missing(a, b, f"{path}.{k}")]
    return [] if ours == theirs else [(path, ours, theirs)]


def test_networks_of_a_vm():
    def interface(**options):
        made = vm.Vm(**{**MADE.__dict__, "cloud": Cloud(project="p", **options)})
        return vm.body(made)["networkInterfaces"][0]

    nat = [{"type": "ONE_TO_ONE_NAT", "name": "external-nat"}]
    assert interface() == {"network": "projects/p/global/networks/default", "accessConfigs": nat}
    assert interface(network="a", external_ips=False) == {"network": "projects/p/global/networks/a"}
    assert interface(subnetwork="s", external_ips=False) == {
        "subnetwork": "projects/p/regions/us-central2/subnetworks/s"
    }
    full = interface(network="projects/q/global/networks/a", external_ips=False)
    assert full == {"network": "projects/q/global/networks/a"}


def test_the_startup_script_is_one_that_bash_reads(tmp_path):
    text = vm.script("true")
    assert text.startswith("#!/bin/bash") and "lmwright.cloud.host" not in text
    assert text.index("trap leave EXIT") < text.index("fetch ") < text.index("python=")
    (tmp_path / "script").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "script"]).returncode == 0


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([(401, {})], "no valid credentials; run: gcloud auth application-default login"),
        ([(403, {})], "roles/compute.instanceAdmin.v1 and roles/iam.serviceAccountUser"),
        ([refused(403, "X", "no")], r"refuses it \(no\)"),
        ([refused(400, "X", "bad name")], "the service refuses it: bad name"),
        ([refused(404, "X", "no")], "project p has no zone us-central2-b"),
        ([(200, DONE | {"error": {"errors": [{"code": "ZONE_RESOURCE_POOL_EXHAUSTED"}]}})],
         "instance x in us-central2-b: ZONE_RESOURCE_POOL_EXHAUSTED"),
        ([(503, {})] * 5, r"Compute Engine does not answer \(HTTP 503\)"),
    ],
)  # fmt: skip
def test_refusals_are_told(heard, answers, told):
    heard.answers = answers
    with pytest.raises(UserError, match=told):
        vm.make(Compute("p"), MADE)


def test_what_is_gone_is_deleted_already(heard):
    gone = {"errors": [{"code": "RESOURCE_NOT_FOUND", "message": "was not found"}]}
    for answer in (refused(404, "X", "no"), (200, DONE | {"error": gone})):
        heard.answers = [answer]
        Compute("p").delete(ZONE, "instances", "x")
    heard.answers = [refused(400, "X", "in use")]
    with pytest.raises(Refused, match="in use"):
        Compute("p").delete(ZONE, "disks", "wiki")


def test_a_request_that_is_sent_again_is_the_same(heard):
    heard.answers = [(503, {}), (200, {"name": "op", "status": "RUNNING"}), (200, DONE)]
    vm.make(Compute("p"), MADE)
    first, again, waited = (path for _, _, path, _ in heard.requests)
    assert first == again and "requestId=" in first and waited.endswith("/operations/op/wait")


def test_a_machine_without_a_network_is_told(monkeypatch, heard):
    monkeypatch.setenv(compute_api.ENDPOINT, "http://127.0.0.1:9/compute/v1/")
    with pytest.raises(UserError, match=r"does not answer \(ConnectionError\); try again"):
        Compute("p").get(ZONE, "disks", "x")
