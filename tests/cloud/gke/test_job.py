"""A job on GKE as a user launches it: the official client, pods whose containers are processes that
install and train as they would there, a real bucket, and nodes that are taken away."""

import contextlib
import json
import shutil
import threading
import time

import pytest

pytest.importorskip("kubernetes", reason="kubernetes is not installed")

from lmwright.cli.main import main
from lmwright.cloud import remote
from lmwright.cloud.local import free_port, variables
from lmwright.cloud.slices import Patience, Slices
from lmwright.storage.bucket import Bucket
from tests.cloud.fake_gke import FakeGke
from tests.cloud.fake_tpu import TOKEN
from tests.cloud.gke.jobs import SECRET, SPOT, launched
from tests.storage.test_runs import losses

QUICK = Patience(poll=0.3, first_word=120.0, silence=60.0)
USER = "a-token-of-the-user"


@pytest.fixture
def gke(monkeypatch, tmp_path):
    cluster = FakeGke(tmp_path / "pods", variables(1))
    cluster.kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(remote, "Slices", lambda spec, tell, _: Slices(spec, tell, QUICK))
    monkeypatch.setattr("lmwright.cloud.command.LEADER_PORT", free_port())
    yield cluster
    cluster.close()


def consoles(tmp_path):
    return "\n".join(p.read_text()[-3000:] for p in (tmp_path / "pods").rglob("console.log"))


def left_behind(tmp_path, gke, *urls):
    """Everything that left the process of the user, and what it wrote here."""
    left = json.dumps(gke.bodies).encode()
    left += b"".join(p.read_bytes() for p in (tmp_path / "state").rglob("*") if p.is_file())
    for url in urls:
        left += b"".join(Bucket(url).read(name)[0] for name in Bucket(url).entries())
    return left


@pytest.mark.slow  # two minutes
@pytest.mark.parametrize("fault", ["preempted", "preempted with notice", "killed"])
def test_a_fault_and_on_to_the_end(run, gke, host_python, tmp_path, capsys, fault):
    gke.add_pool("a", **SPOT)
    bucket, done = Bucket(run.dir), []

    def enemy():
        """Takes the nodes away as soon as a checkpoint is there, and others come a moment later; or
        kills the container of the first host."""
        end = time.monotonic() + 240
        while time.monotonic() < end:
            with contextlib.suppress(Exception):
                if gke.running() and any("commit_success" in n for n in bucket.entries()):
                    done.append(fault)
                    if fault == "killed":
                        gke.running()[0].end(0.0)
                        return
                    gke.preempt("a", 30.0 if "notice" in fault else 0.0)
                    time.sleep(2)
                    gke.add_pool("b", **SPOT)
                    return
            time.sleep(0.1)

    thread = threading.Thread(target=enemy)
    thread.start()
    code = launched(tmp_path)
    thread.join()
    out = capsys.readouterr().out
    assert code == 0, out + consoles(tmp_path)
    assert done and gke.job_sets == {} and not gke.running() and len(gke.bodies) == 1
    assert ("WAITING_FOR_RESOURCES" in out.partition("ACTIVE")[2]) == (fault != "killed")
    calm = f"{run.dir}-calm"  # by as many processes, so that sums have the same order
    words = [str(tmp_path / "run.toml"), f"dir={calm}", "--on", "local:2x1", "--name", "calm"]
    assert main(["launch", *words]) == 0
    assert losses(run.dir) == losses(calm)
    assert main(["jobs", "show", "j"]) == 0
    shown = capsys.readouterr().out
    assert "slices so far  1" in shown
    assert ("told to end and saved" in shown) == ("notice" in fault)
    assert main(["jobs", "logs", "j", "--host", "1"]) == 0
    shutil.rmtree(tmp_path / "state")
    job = f"gs://{run.dir.split('/')[2]}/lmwright/jobs/j"
    assert main(["jobs", "show", job]) == 0  # from another machine
    left = left_behind(tmp_path, gke, job) + out.encode()
    assert TOKEN.encode() not in left and USER.encode() not in left
    assert main(["jobs", "forget", "j"]) == 0
    assert Bucket(job).entries() == {}


SAY = """
import os
print("rank", *(os.environ.get(name) for name in NAMES))
print("token", len(os.environ["HF_TOKEN"]), os.environ["HF_TOKEN"])
"""
NAMES = ["JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES"]


@pytest.mark.slow  # four pods install
def test_a_command_on_two_slices(url, gke, host_python, tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        gke.add_pool(name, nodes=2)
    gke.secrets["mine"] = {"token": SECRET}
    words = ["--on", "gke:c", "--slice", "2x7x-16", "--name", "j", "--bucket", url]
    say = SAY.replace("NAMES", str(NAMES))
    secret = ["--secret", "HF_TOKEN=mine/token"]
    assert main(["launch", *words, *secret, "--", "python", "-c", say]) == 0, consoles(tmp_path)
    out = ""
    for host in range(4):
        assert main(["jobs", "logs", "j", "--host", str(host)]) == 0
        out += capsys.readouterr().out
    for rank in range(4):
        assert f"rank {rank} 4 {rank // 2} 2" in out
    assert out.count("token 27 ***") == 4
    assert SECRET.encode() not in left_behind(tmp_path, gke, url) + out.encode()
    assert gke.job_sets == {} and not gke.running()


@pytest.mark.slow
def test_a_command_in_one_pod(url, gke, host_python, tmp_path, capsys):
    gke.add_pool("a", topology="2x2x1", nodes=1)
    words = ["--on", "gke:c", "--slice", "7x-8", "--name", "j", "--bucket", url]
    assert main(["launch", *words, "--", "python", "-c", "print(6 * 7)"]) == 0, consoles(tmp_path)
    capsys.readouterr()
    assert main(["jobs", "logs", "j"]) == 0
    assert "42" in capsys.readouterr().out.splitlines()
    assert gke.job_sets == {} and not gke.running()


def test_a_bucket_that_pods_cannot_read_fails_the_job(url, gke, host_python, tmp_path, capsys):
    gke.add_pool("a", topology="2x2x1", nodes=1)
    gke.variables = gke.variables | {"LMWRIGHT_PATIENCE_S": "0"}
    gke.metadata.answer = lambda *_: (403, "")  # no account is bound to the pods'
    words = ["--on", "gke:c", "--slice", "7x-8", "--name", "j", "--bucket", url]
    assert main(["launch", *words, "--", "true"]) == 1
    said = capsys.readouterr().err
    assert "the pods cannot read it (403" in said and "by Workload Identity" in said
    assert gke.job_sets == {} and not gke.running()
