"""JobSets are made, watched, deleted and made again, through the official client."""

import json
import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("kubernetes", reason="kubernetes is not installed")

from lmwright.cli.main import main
from lmwright.cloud.book import MADE, begin
from lmwright.cloud.gke import cluster
from lmwright.cloud.gke.cluster import Cluster
from lmwright.cloud.slices import Patience, Slices
from lmwright.cloud.spec import Spec, load_spec
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from tests.cloud.gke.jobs import CLOUD, CONTEXT, OFFER, SPOT, metadata
from tests.cloud.played import Killed, killed_after

QUICK = Patience(
    poll=0.01, first_word=0.6, silence=0.6, repair=0.3, elsewhere=0.2, stop=0.3, backoff=0.05
)


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


@pytest.mark.parametrize("why", ["asked", "budget"])
def test_a_job_that_has_to_end_leaves_nothing_behind(url, gke, why):
    limit = 1e-9 if why == "budget" else 0.0
    spec = Spec(
        name="j", dir="", command=("true",), hosts=2, port=0, url=f"{url}/jobs/j",
        cloud=replace(CLOUD, max_hours=limit), offers=(OFFER,),
    )  # fmt: skip
    begin(spec, f"{url}/code/abc", "")
    player = Played(spec)
    player.until(player.active)
    if why == "asked":
        player.bucket.write("stop", "stopped as asked")
    state = player.slices.run()  # the pods have their time to save, and do not
    player.slices.close()
    assert state["status"] == "stopped" and gke.job_sets == {}
    assert ("the limit of 1e-09 h is reached" in state["error"]) == (why == "budget")


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 4, 6])
def test_a_launch_that_is_interrupted_leaves_no_orphan(spec, gke, monkeypatch, calls):
    counted = killed_after(calls)
    first = Played(spec)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "write", counted(Bucket.write))
        patch.setattr(Cluster, "create", counted(Cluster.create))
        with pytest.raises(Killed):
            for number in range(50):
                first.slices.step()
                first.state(time=number)
    first.slices.close()
    second = Played(spec)
    second.until(second.active)
    assert len(gke.job_sets) == 1
    second.state(status="done")
    second.slices.run()
    second.slices.close()
    assert gke.job_sets == {} and len(gke.bodies) == 1


def test_a_job_set_of_another_job_is_not_touched(played, gke, spec):
    other = replace(spec, url=f"{spec.url}-of-somebody-else")
    Cluster(CLOUD, other.url).create("j-1", "j", OFFER, metadata(other))
    with pytest.raises(
        UserError, match="already has a JobSet j-1 that is not yours; choose another name"
    ):
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


THROTTLED = """Back-off pulling image "python:3.12-slim": ErrImagePull: failed to copy: 429 Too Many
Requests - toomanyrequests: You have reached your unauthenticated pull rate limit."""


@pytest.mark.parametrize(
    ("reason", "message", "minutes", "ends"),
    [
        ("ImagePullBackOff", THROTTLED, 2, False),
        ("ImagePullBackOff", THROTTLED, 11, True),
        ("ErrImagePull", 'reading manifest: Get "https://x/v2/": dial tcp: i/o timeout', 1, False),
        (
            "ErrImagePull",
            "failed to resolve docker.io/library/pyton:3: not found",
            0,
            True,
        ),
        ("ImagePullBackOff", "pull access denied, repository does not exist", 0, True),
        ("InvalidImageName", "", 0, True),
        ("CreateContainerConfigError", "failed to sync secret cache: timed out waiting", 1, False),
        ("CreateContainerConfigError", "couldn't find key K in Secret default/s", 0, True),
        ("ContainerCreating", "", 60, False),
    ],
)
def test_what_the_node_tries_again_fails_no_job(reason, message, minutes, ends):
    """Messages as kubelet and containerd write them."""
    from kubernetes import client as k8s

    waiting = k8s.V1ContainerStateWaiting(reason=reason, message=message)
    status = k8s.V1ContainerStatus(
        name="rank", image="", image_id="", ready=False, restart_count=0,
        state=k8s.V1ContainerState(waiting=waiting),
    )  # fmt: skip
    began = datetime.now(UTC) - timedelta(minutes=minutes)
    pod = k8s.V1Pod(
        metadata=k8s.V1ObjectMeta(name="p"),
        status=k8s.V1PodStatus(start_time=began, container_statuses=[status]),
    )
    assert bool(cluster._hopeless(pod)) == ends


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
    assert main(["jobs", "ssh", "j", "--host", "1", "--tunnel", "9000:8888"]) == 0
    assert shlex.split((tmp_path / "said").read_text())[4:] == [
        "port-forward",
        said[5],
        "9000:8888",
    ]
    assert main(["jobs", "ssh", "j", "--tunnel", "9000", "ls"]) == 2
    assert "kubectl does one thing at a time" in capsys.readouterr().err
    assert main(["jobs", "forget", "j", "--kill"]) == 0
    assert all("deletionTimestamp" in job["metadata"] for job in gke.job_sets.values())
