"""JobSets are made, watched, deleted and made again, through the official client."""

import json
import shlex
from dataclasses import replace

import pytest

pytest.importorskip("kubernetes", reason="kubernetes is not installed")

import yaml

from lmwright.cli.main import main
from lmwright.cloud import place, remote
from lmwright.cloud.gke import context
from lmwright.cloud.gke.cluster import Cluster
from lmwright.cloud.gke.manifest import job_set
from lmwright.cloud.service import Away
from lmwright.cloud.slices import MADE, Patience, Slices, begin
from lmwright.cloud.spec import Cloud, Gke, Offer, Spec, dump_spec, load_spec, parse_spec
from lmwright.config.load import dump_toml
from lmwright.config.run import Checkpoint
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from tests.cloud.fake_gke import FakeGke, check_job_set

CONTEXT = "gke_p_us-central1-c_c"
QUICK = Patience(
    poll=0.01, first_word=0.6, silence=0.6, repair=0.3, elsewhere=0.2, stop=0.3, backoff=0.05
)
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


class Played:
    """A supervisor whose pods are played by the test."""

    def __init__(self, spec):
        self.told, self.bucket = [], Bucket(spec.url)
        self.slices = Slices(spec, self.told.append, QUICK)

    def until(self, condition, speak=True):
        for number in range(400):
            if self.slices.step() is not None:
                assert condition(), self.told
                return
            if condition():
                return
            if speak:
                self.state(time=number)
        raise AssertionError(self.told)

    def state(self, **facts):
        state = {"status": "running", "attempt": 1, "failures": 0, "step": 0, "saved": 0}
        self.bucket.write("state.json", json.dumps(state | {"error": ""} | facts))

    @property
    def book(self):
        return json.loads(self.bucket.read(MADE)[0])

    def active(self):
        current = self.book["current"]
        return current is not None and "active" in self.book["made"][current]


@pytest.fixture
def played(spec):
    player = Played(spec)
    yield player
    player.slices.close()


def test_a_job_that_is_done_leaves_nothing_behind(played, gke):
    played.until(played.active)
    assert list(gke.job_sets) == ["j-1"]
    played.state(status="done", step=7)
    assert played.slices.run()["status"] == "done"
    assert gke.job_sets == {} and gke.pods == {}
    [entry] = played.book["made"]
    assert entry["active"] <= entry["ended"]


def test_pods_whose_nodes_are_lost_and_come_back_go_on(played, gke):
    played.until(played.active)
    gke.preempt("a")
    played.until(lambda: any("WAITING" in line for line in played.told), speak=False)
    gke.add_pool("b", **SPOT)
    played.until(lambda: gke.pods["j-1"][0].phase == "Running")
    assert len(gke.bodies) == 1 and gke.pods["j-1"][0].pool == "b"


def test_nodes_that_do_not_come_back_make_another_job_set(played, gke):
    played.until(played.active)
    gke.preempt("a")
    played.until(lambda: list(gke.job_sets) == ["j-2"], speak=False)
    assert any("slice 0 is REPAIRING" in line for line in played.told)


@pytest.mark.parametrize("fault", ["failed", "deleted by hand"])
def test_a_job_set_that_is_lost_is_made_again(played, gke, fault):
    played.until(played.active)
    if fault == "failed":
        failed = {"type": "Failed", "status": "True", "message": "too many restarts"}
        gke.job_sets["j-1"]["status"] = {"conditions": [failed]}
    else:
        del gke.job_sets["j-1"], gke.pods["j-1"]
    played.until(lambda: list(gke.job_sets) == ["j-2"])
    assert ("too many restarts" in str(played.told)) == (fault == "failed")


def test_an_answer_that_is_lost_makes_one_job_set(played, gke):
    gke.lost = 1
    played.until(played.active)
    assert len(gke.bodies) == 1 and any("is not reached" in line for line in played.told)


def test_a_cluster_that_is_away_is_waited_for(played, gke):
    played.until(played.active)
    gke.down = True
    for _ in range(5):
        assert played.slices.step() is None
    gke.down = False
    played.until(lambda: any("job running" in line for line in played.told))
    assert len(gke.bodies) == 1
    assert sum("cannot answer now (503" in line for line in played.told) == 1


def test_a_quota_is_waited_for(played, gke):
    gke.quota = "tpus"
    for _ in range(3):
        played.slices.step()
    assert gke.job_sets == {} and any("exceeded quota: tpus" in line for line in played.told)
    gke.quota = ""
    played.until(played.active)


def test_a_launch_that_is_interrupted_leaves_no_orphan(spec, gke, monkeypatch):
    first = Played(spec)
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "request", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            for _ in range(3):
                first.slices.step()
    first.slices.close()
    assert list(gke.job_sets) == ["j-1"]
    second = Played(spec)
    second.until(second.active)
    second.state(status="done")
    second.slices.run()
    second.slices.close()
    assert gke.job_sets == {} and len(gke.bodies) == 1


def test_a_job_set_of_another_job_is_not_touched(played, gke, spec):
    other = replace(spec, url=f"{spec.url}-of-somebody-else")
    Cluster(CLOUD, other.url).create("j-1", "j", OFFER, metadata(other))
    with pytest.raises(UserError, match="has a JobSet j-1 of somebody else; choose another name"):
        played.until(played.active)
    assert list(gke.job_sets) == ["j-1"] and not any(m == "DELETE" for m, *_ in gke.calls)


def test_a_secret_that_goes_missing_fails_the_job(url, gke):
    spec = Spec(
        name="j", dir="", command=("true",), hosts=2, port=0, url=f"{url}/jobs/j",
        cloud=replace(CLOUD, secrets=("T=mine/token",)), offers=(OFFER,),
    )  # fmt: skip
    begin(spec, f"{url}/code/abc", "")
    player = Played(spec)
    state = player.slices.run()
    player.slices.close()
    assert (state["status"], gke.job_sets) == ("failed", {})
    assert 'CreateContainerConfigError: secret "mine" not found; correct' in state["error"]


def metadata(spec):
    return {"lmwright-job": spec.url, "lmwright-code": "gs://b/code/abc"}


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


def test_a_pod_knows_its_place_from_the_environment(spec, gke):
    two = replace(OFFER, num_slices=2, num_chips=16)
    Cluster(CLOUD, spec.url).create("j-1", "j", two, metadata(spec))
    found = [place.find_place(pod.variables()) for pod in gke.pods["j-1"]]
    assert [(p.slice_index, p.worker) for p in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[3].several["MEGASCALE_SLICE_ID"] == "1"
    assert found[3].several["MEGASCALE_NUM_SLICES"] == "2" and found[3].in_pod
    given = gke.pods["j-1"][0].variables() | {"MEGASCALE_COORDINATOR_ADDRESS": "by-gke"}
    assert place.find_place(given).several["MEGASCALE_COORDINATOR_ADDRESS"] == "by-gke"
    with pytest.raises(SystemExit, match="no number of this pod"):
        place.find_place({"LMWRIGHT_JOB_URL": "gs://b/j"})


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


@pytest.fixture
def run(small_run, url, tmp_path):
    """A run in the bucket."""
    assert main(["data", "push", small_run.data.dir, f"{url}/data"]) == 0
    run = replace(
        small_run,
        dir=f"{url}/run",
        data=replace(small_run.data, dir=f"{url}/data"),
        train=replace(small_run.train, global_batch_size=16, num_microbatches=1),
        checkpoint=Checkpoint(save_every_steps=3),
    )
    (tmp_path / "run.toml").write_text(dump_toml(run))
    return run


def launched(tmp_path, *words):
    options = ["--on", "gke:c", "--slice", "7x-16", "--spot", "--name", "j", *words]
    return main(["launch", str(tmp_path / "run.toml"), *options])


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
    compile(command["containers"][0]["command"][2], "entry", "exec")
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
        (["--guaranteed"], None, "GKE knows no such capacity"),
        (["--secret", "T=mine"], None, "T=...: write VARIABLE=SECRET/KEY"),
        (["--secret", f"T={SECRET}/k"], None, "not the secret itself"),
        (["--label", "x"], None, "--label: 'x' is none of Kubernetes"),
        (["--name", "n" * 40], None, "too long for the names of pods; use at most 36"),
        (["dir=here"], None, "dir: here: the hosts of a slice cannot see it"),
        ([], ("has_job_sets", False), "it has no JobSets; have them installed: https://jobset"),
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
        remote.check(spec)
    gke.server.shutdown()
    gke.server.server_close()
    with pytest.raises(Away, match="is not reached"):
        remote.check(spec)


def test_what_is_not_known_is_said(spec, gke):
    assert remote.check(spec) == []
    gke.lists_nodes = False
    assert "this account may not list nodes" in remote.check(spec)[0]
    gke.lists_nodes, gke.pools = True, {}
    [note] = remote.check(spec)
    assert "0 of the 2 nodes for 7x-16 are there; it is unknown whether a node pool or" in note
    gke.add_pool("b")
    assert "which --spot or --reservation excludes" in remote.check(spec)[0]
    gke.add_pool("c", **SPOT)
    on_demand = replace(spec, cloud=replace(CLOUD, capacity="on-demand"))
    assert remote.check(on_demand) == []
    del gke.pools["b"]
    assert "add --spot" in remote.check(on_demand)[0]


def test_secrets_are_not_read(spec, gke):
    gke.secrets = {"mine": {"token": SECRET}}
    asks = replace(spec, cloud=replace(CLOUD, secrets=("T=mine/token",)))
    assert remote.check(asks) == []
    assert all(
        a.startswith("application/json;as=Partial") for _, p, a in gke.calls if "secrets" in p
    )


def test_a_shell_in_a_pod(spec, played, gke, tmp_path, monkeypatch, capsys):
    played.until(played.active)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\n')
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert main(["jobs", "show", spec.url]) == 0
    assert load_spec("j") == spec
    assert main(["jobs", "ssh", "j", "--host", "1", "ls", "a b"]) == 0
    said = shlex.split((tmp_path / "said").read_text().replace("sh -c", ""))
    assert said[:5] == ["--context", CONTEXT, "--namespace", "default", "exec"]
    assert said[5] == gke.pods["j-1"][1].name
    assert main(["jobs", "forget", "j", "--kill"]) == 0
    assert all("deletionTimestamp" in job["metadata"] for job in gke.job_sets.values())
