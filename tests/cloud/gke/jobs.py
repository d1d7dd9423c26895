"""What the tests of launching on GKE share: a cluster, and a job on it."""

import pytest

from lmwright.cli.main import main
from lmwright.cloud.book import begin
from lmwright.cloud.spec import Cloud, Gke, Offer, Spec
from tests.cloud.fake_gke import FakeGke

CONTEXT = "gke_p_us-central1-c_c"
OFFER = Offer(
    name="7x-16", zone=f"{CONTEXT}/default", accelerator_type="tpu7x", topology="2x2x2",
    runtime="i", hosts_per_slice=2, num_chips=8, price=12.0,
)  # fmt: skip
CLOUD = Cloud(capacity="spot", gke=Gke(context=CONTEXT, image="i"))
SPOT = {"cloud.google.com/gke-spot": "true"}
SECRET = "hf_" + "a1B2" * 6


@pytest.fixture
def gke(monkeypatch, tmp_path):
    cluster = FakeGke()
    cluster.add_pool("a", **SPOT)
    cluster.kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield cluster
    cluster.close()


@pytest.fixture
def spec(url, gke):
    spec = Spec(
        name="j", dir=f"{url}/run", command=("train",), hosts=2, port=0, url=f"{url}/jobs/j",
        cloud=CLOUD, offers=(OFFER,),
    )  # fmt: skip
    begin(spec, f"{url}/code/abc", "")
    return spec


def metadata(spec):
    return {"lmwright-job": spec.url, "lmwright-code": "gs://b/code/abc"}


def launched(tmp_path, *words):
    options = ["--on", "gke:c", "--slice", "7x-16", "--spot", "--name", "j", *words]
    return main(["launch", str(tmp_path / "run.toml"), *options])
