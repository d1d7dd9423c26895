"""What a launch on GKE asks for, shows and refuses, through the official client."""

import ast
import sys
from dataclasses import replace

import pytest

pytest.importorskip("kubernetes", reason="kubernetes is not installed")

import yaml

from lmwright.cloud import identity
from lmwright.cloud.checks import check
from lmwright.cloud.gke import context
from lmwright.cloud.gke.cluster import Cluster
from lmwright.cloud.gke.manifest import job_set, selector
from lmwright.cloud.gke.target import offers_of_gke
from lmwright.cloud.service import Away
from lmwright.cloud.spec import Cloud, Gke, dump_spec, parse_spec
from lmwright.cloud.target import Settings
from lmwright.errors import UserError
from tests.cloud.fake_gke import check_job_set
from tests.cloud.gke.jobs import CLOUD, CONTEXT, OFFER, SECRET, SPOT, launched, metadata


def test_two_slices_and_all_that_may_be_asked_for(spec):
    gke = Gke(context=CONTEXT, namespace="n", image="me/it:1", account="ksa", queue="q",
              labels=("team=nlp",))  # fmt: skip
    cloud = Cloud(capacity="reserved", reservation="r", gke=gke, secrets=("T=mine/token",))
    two = replace(OFFER, num_slices=2, num_chips=16)
    manifest = job_set(cloud, "j-1", "j", two, metadata(spec))
    assert check_job_set(manifest) == ""
    job = manifest["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (2, 2)
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
    assert pod["nodeSelector"]["cloud.google.com/reservation-name"] == "r"
    assert pod["serviceAccountName"] == "ksa" and pod["containers"][0]["image"] == "me/it:1"
    labels = manifest["metadata"]["labels"]
    assert labels["team"] == "nlp" and labels["kueue.x-k8s.io/queue-name"] == "q"
    assert parse_spec(dump_spec(replace(spec, cloud=cloud)).encode()).cloud == cloud


@pytest.mark.parametrize(
    ("name", "accelerator", "topology"),
    [  # https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
        ("v3-8", "tpu-v3-device", "2x2"),
        ("v3-32", "tpu-v3-slice", "4x4"),
        ("v4-8", "tpu-v4-podslice", "2x2x1"),
        ("v5e-8", "tpu-v5-lite-podslice", "2x4"),
        ("v5e-16", "tpu-v5-lite-podslice", "4x4"),
        ("v5p-8", "tpu-v5p-slice", "2x2x1"),
        ("v6e-4", "tpu-v6e-slice", "2x2"),
        ("7x-8", "tpu7x", "2x2x1"),
    ],
)
def test_labels_of_the_nodes(name, accelerator, topology):
    [asked] = offers_of_gke(name, Settings(), CONTEXT)
    labels = selector(asked, CLOUD)
    assert labels["cloud.google.com/gke-tpu-accelerator"] == accelerator
    assert labels["cloud.google.com/gke-tpu-topology"] == topology


def test_a_pod_knows_its_place_from_the_environment(spec, gke):
    two = replace(OFFER, num_slices=2, num_chips=16)
    Cluster(CLOUD, spec.url).create("j-1", "j", two, metadata(spec))
    found = [identity.find_identity(pod.variables()) for pod in gke.pods["j-1"]]
    assert [(p.slice_index, p.worker) for p in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[3].several["MEGASCALE_SLICE_ID"] == "1"
    assert found[3].several["MEGASCALE_NUM_SLICES"] == "2" and found[3].in_pod
    given = gke.pods["j-1"][0].variables() | {"MEGASCALE_COORDINATOR_ADDRESS": "by-gke"}
    assert identity.find_identity(given).several["MEGASCALE_COORDINATOR_ADDRESS"] == "by-gke"
    with pytest.raises(SystemExit, match="no number of this pod"):
        identity.find_identity({"LMWRIGHT_JOB_URL": "gs://b/j"})


def test_which_cluster_is_meant(gke, tmp_path):
    assert context.find_context("c") == context.find_context(CONTEXT) == CONTEXT
    with pytest.raises(UserError, match=f"these contexts: {CONTEXT}; run: gcloud container"):
        context.find_context("d")
    gke.kubeconfig(tmp_path / "kubeconfig", CONTEXT, "gke_q_us-east5_c", "minikube")
    with pytest.raises(UserError, match="is one of gke_p_us-central1-c_c, gke_q_us-east5_c"):
        context.find_context("c")
    assert context.find_context("minikube") == "minikube"
    (tmp_path / "kubeconfig").write_text("nothing: [")
    with pytest.raises(UserError, match="the kubeconfig cannot be used"):
        context.find_context("c")


def test_without_the_client(gke, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UserError, match=r"needs the package kubernetes; run `pip install"):
        context.find_context("c")


def test_a_dry_run_is_a_manifest_and_makes_nothing(run, gke, tmp_path, capsys):
    words = [
        "train.global_batch_size=32",
        "--slice",
        "7x-16,2x7x-16",
        "--secret",
        "HF_TOKEN=mine/token",
        "--dry-run",
    ]
    assert launched(tmp_path, *words) == 0
    said = capsys.readouterr()
    first, second = yaml.safe_load_all(said.out)
    assert check_job_set(first) == check_job_set(second) == ""
    assert second["spec"]["replicatedJobs"][0]["replicas"] == 2
    command = first["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    ast.parse(command["containers"][0]["command"][2], feature_version=(3, 8))
    assert f"# would call POST /apis/{first['apiVersion']}/namespaces/default/jobsets" in said.out
    assert "FITS" in said.err
    assert gke.calls == []


@pytest.mark.parametrize(
    ("words", "broken", "told"),
    [
        (["--on", "gke:d"], None, "the kubeconfig has no such cluster"),
        (["--on", "gke:"], None, "names no cluster"),
        (["--slice", ""], None, "--slice: missing"),
        (["--slice", "7x-17"], None, "7x has no slice of 17"),
        (["--slice", "v2-8"], None, "GKE has no v2"),
        (["--slice", "2xv5e-8"], None, "joins only slices of several hosts"),
        (["--zone", "us-east5-a"], None, "--zone: has no effect here"),
        (["--internal-ips"], None, "--internal-ips: has no effect here"),
        (["--on", "v4-8", "--label", "a=b"], None, "--label: has no effect here, it is only"),
        (["--guaranteed"], None, "GKE has no such capacity"),
        (["--secret", "T=mine"], None, "T=...: write VARIABLE=SECRET/KEY"),
        (["--secret", f"T={SECRET}/k"], None, "not the secret itself"),
        (["--label", "x"], None, "--label: 'x' is not a Kubernetes label"),
        (["--name", "n" * 40], None, "too long for the names of pods; use at most 36"),
        (["dir=here"], None, "dir: here: the hosts of a slice cannot see it"),
        ([], ("has_job_sets", False), "it has no JobSets; install them: https://jobset"),
        ([], ("denied", {"create jobsets", "list pods"}), "may not create jobsets, list pods in"),
        (["--namespace", "n"], None, "it has no namespace n; name another by --namespace, or"),
        (["--pod-account", "me"], None, "no service account me (--pod-account); make it: kubectl"),
        (["--queue", "me"], None, "no local queue me of Kueue"),
        (["--secret", "T=me/k", "--queue", "q"], None, "no local queue q of Kueue; correct or "
         "leave out --queue; namespace default has no secret me"),
        (["--slice", "7x:2x2x1"], ("chips", 8), "nodes with 4 chips, and those of 2x2x1 have 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched(run, gke, tmp_path, capsys, monkeypatch, words, broken, told):
    if broken and broken[0] == "chips":
        gke.add_pool("odd", topology="2x2x1", nodes=1, chips=8, **SPOT)
    elif broken:
        setattr(gke, *broken)
    assert launched(tmp_path, *words) == 2
    said = capsys.readouterr().err
    assert told in said and SECRET not in said
    assert not any(m == "POST" and "jobsets" in path for m, path, _ in gke.calls)
    assert not (tmp_path / "state" / "lmwright" / "jobs" / "j").exists()


def test_unreachable_or_without_credentials(spec, gke, tmp_path, monkeypatch):
    path = tmp_path / "kubeconfig"
    path.write_text(path.read_text().replace("a-token-of-the-user", "another"))
    with pytest.raises(UserError, match="takes no credentials from here; run: gcloud auth login"):
        check(spec)
    gke.server.shutdown()
    gke.server.server_close()
    with pytest.raises(Away, match="is not reached"):
        check(spec)


def test_what_is_not_known_is_said(spec, gke):
    assert check(spec) == []
    gke.lists_nodes = False
    assert "this account may not list nodes" in check(spec)[0]
    gke.lists_nodes, gke.pools = True, {}
    [note] = check(spec)
    assert "0 of the 2 nodes for 7x-16 are there; it is unknown whether a node pool or" in note
    gke.add_pool("b")
    assert "which --spot or --reservation excludes" in check(spec)[0]
    gke.add_pool("c", **SPOT)
    on_demand = replace(spec, cloud=replace(CLOUD, capacity="on-demand"))
    assert check(on_demand) == []
    del gke.pools["b"]
    assert "add --spot" in check(on_demand)[0]


def test_secrets_are_not_read(spec, gke):
    gke.secrets = {"mine": {"token": SECRET}}
    asks = replace(spec, cloud=replace(CLOUD, secrets=("T=mine/token",)))
    assert check(asks) == []
    assert all(
        a.startswith("application/json;as=Partial") for _, p, a in gke.calls if "secrets" in p
    )
