"""A job on slices as a user launches it: the real client, the real startup script on every host of
a service that is played, the real training in a real bucket, and slices that are taken away."""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from lmwright.cli.main import main
from lmwright.cloud import remote, roles, stage, vault
from lmwright.cloud.book import begin
from lmwright.cloud.local import free_port, variables
from lmwright.cloud.slices import Patience, Slices
from lmwright.cloud.spec import Cloud, Limits, Offer, Spec
from lmwright.cloud.tpu_api import ENDPOINT, NO_CREDENTIALS
from lmwright.storage.bucket import Bucket
from tests.cloud.fake_tpu import TOKEN, FakeTpu
from tests.storage.test_runs import losses

ZONE = "us-central2-b"
QUICK = Patience(poll=0.3, first_word=120.0, silence=60.0)


@pytest.fixture
def tpu(monkeypatch, tmp_path):
    service = FakeTpu(tmp_path / "hosts", variables(1))
    monkeypatch.setenv(ENDPOINT, f"http://{service.server.address}/")
    monkeypatch.setenv(vault.ENDPOINT, f"http://{service.server.address}/")
    monkeypatch.setenv(roles.ENDPOINT, f"http://{service.server.address}/")
    monkeypatch.setenv(NO_CREDENTIALS, "true")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield service
    service.close()


def launched(tmp_path, *words):
    options = ["--on", "v4-16", "--zone", ZONE, "--project", "p", "--name", "j", *words]
    return main(["launch", str(tmp_path / "run.toml"), *options])


def consoles(tmp_path):
    return "\n".join(p.read_text()[-3000:] for p in (tmp_path / "hosts").rglob("console.log"))


@pytest.mark.slow  # two minutes
def test_preempted_and_back_to_the_end(run, tpu, host_python, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(remote, "Slices", lambda spec, tell, _: Slices(spec, tell, QUICK))
    monkeypatch.setattr("lmwright.cloud.command.LEADER_PORT", free_port())
    bucket = Bucket(run.dir)

    def enemy():
        """Takes the slice away as soon as a checkpoint is there."""
        end = time.monotonic() + 240
        while time.monotonic() < end:
            with contextlib.suppress(Exception):
                if tpu.active() and any("commit_success" in n for n in bucket.entries()):
                    tpu.preempt(*tpu.active()[0])
                    return
            time.sleep(0.1)

    thread = threading.Thread(target=enemy)
    thread.start()
    code = launched(tmp_path, "--spot")
    thread.join()
    out = capsys.readouterr().out
    assert code == 0, out + consoles(tmp_path)
    assert tpu.resources == {} and not tpu.running
    assert len([body for body in tpu.bodies if "spot" in body]) == 2
    compiled = Bucket(f"gs://{run.dir.split('/')[2]}/lmwright/compiled").entries()
    assert any("train_step" in name for name in compiled)  # the second slice found it there
    calm = f"{run.dir}-calm"  # by as many processes, so that sums have the same order
    words = [str(tmp_path / "run.toml"), f"dir={calm}", "--on", "local:2x1", "--name", "calm"]
    assert main(["launch", *words]) == 0
    assert losses(run.dir) == losses(calm)
    assert main(["jobs", "show", "j"]) == 0
    assert "slices so far  2" in capsys.readouterr().out
    assert main(["jobs", "logs", "j", "--host", "1"]) == 0
    shutil.rmtree(tmp_path / "state")
    job = f"gs://{run.dir.split('/')[2]}/lmwright/jobs/j"
    assert main(["jobs", "show", job]) == 0  # from another machine
    for name in Bucket(job).entries():
        assert TOKEN.encode() not in Bucket(job).read(name)[0]
    assert TOKEN not in json.dumps(tpu.bodies) + out
    assert main(["jobs", "forget", "j"]) == 0
    assert Bucket(job).entries() == {}


@pytest.mark.parametrize("policy", [{}, {"bindings": [{"role": "roles/viewer", "members": []}]}])
def test_an_account_that_may_not_delete_its_slice_is_told(tpu, policy):
    cloud = Cloud(project="p")
    assert roles.warn_of_roles(cloud) == []
    tpu.policy = policy
    [note] = roles.warn_of_roles(cloud)
    assert "12-compute@developer.gserviceaccount.com may not delete slices" in note
    [note] = roles.warn_of_roles(replace(cloud, service_account="me@p"))
    assert "--member=serviceAccount:me@p --role=roles/tpu.admin" in note
    tpu.server.shutdown()
    tpu.server.server_close()
    [note] = roles.warn_of_roles(cloud)
    assert "it is not known whether the hosts may delete" in note


SECRETS = {
    "HF_TOKEN": "hf_" + "a1B2" * 6, "WANDB_API_KEY": "9f8e7d6c5b4a" * 3, "KAGGLE_KEY": "k4gg1e-key",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
}  # fmt: skip
SAY = """
import os
print("rank", *(os.environ.get(name) for name in NAMES), os.path.exists("run.toml"))
print("token", len(os.environ["HF_TOKEN"]), os.environ["HF_TOKEN"])
"""
NAMES = ["JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES"]


@pytest.mark.slow  # each host installs
def test_a_command_on_two_slices(url, tpu, host_python, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(remote, "Slices", lambda spec, tell, _: Slices(spec, tell, QUICK))
    monkeypatch.setattr("lmwright.cloud.command.LEADER_PORT", free_port())
    tpu.hosts = 1
    words = ["--on", "2xv4-8", "--zone", ZONE, "--project", "p", "--name", "j", "--bucket", url]
    words += ["--secret", "HF_TOKEN=mine"]
    tpu.secrets["mine"] = SECRETS["HF_TOKEN"].encode()
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    tpu.only_here = set(SECRETS)
    say = SAY.replace("NAMES", str(NAMES))
    assert main(["launch", *words, "--", "python", "-c", say]) == 0, consoles(tmp_path)
    out = ""
    for host in (0, 1):
        assert main(["jobs", "logs", "j", "--host", str(host)]) == 0
        out += capsys.readouterr().out
    assert "rank 0 2 0 2 True" in out and "rank 1 2 1 2 True" in out
    assert out.count("token 27 ***") == 2
    left = out.encode() + json.dumps(tpu.bodies).encode()
    left += b"".join(p.read_bytes() for p in (tmp_path / "state").rglob("*") if p.is_file())
    left += b"".join(Bucket(url).read(name)[0] for name in Bucket(url).entries())
    assert not [name for name, value in SECRETS.items() if value.encode() in left]
    assert tpu.bodies[0]["tpu"]["nodeSpec"][0]["multisliceParams"]["nodeCount"] == 2
    assert tpu.resources == {} and not tpu.running


@pytest.mark.slow  # the host installs
def test_a_secret_that_is_not_there_fails_the_job(
    url, tpu, host_python, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(remote, "Slices", lambda spec, tell, _: Slices(spec, tell, QUICK))
    tpu.hosts = 1
    words = ["--on", "v4-8", "--zone", ZONE, "--project", "p", "--name", "j", "--bucket", url]
    assert main(["launch", *words, "--secret", "HF_TOKEN=mine", "--", "true"]) == 2
    assert "mine of project p: Not Found; make it: gcloud secrets" in capsys.readouterr().err
    assert tpu.resources == {} and not tpu.running


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--secret", "HF_TOKEN=hf_" + "a" * 30, "--", "true"], "and not the secret itself"),
        (["--secret", "HF_TOKEN", "--", "true"], "HF_TOKEN=...: write VARIABLE=NAME"),
        (["--", "wandb", "login", "0123456789"], "word 3 of the command holds the value of $WANDB"),
        (["--", "curl", "https://me:pw@host/x"], "word 2 of the command holds a password or token"),
        (["--", "env", "T=ghp_" + "x" * 30], "word 2 of the command holds a password or token"),
    ],
)
def test_secrets_are_not_taken_by_mistake(url, tpu, monkeypatch, capsys, words, told):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    place = ["--on", "v4-8", "--zone", ZONE, "--project", "p", "--bucket", url]
    assert main(["launch", *place, *words]) == 2
    said = capsys.readouterr().err
    assert told in said and "0123456789" not in said and "pw@" not in said
    assert not any(call[0] == "POST" for call in tpu.calls) and Bucket(url).entries() == {}


@pytest.mark.slow  # the host installs
def test_a_slice_that_nobody_supervises_deletes_itself(url, tpu, host_python, tmp_path):
    tpu.hosts = 1
    spec = Spec(
        name="j", dir="", command=("python", "-c", "print(1)"), hosts=1, port=free_port(),
        url=f"{url}/jobs/j", cloud=Cloud(project="p"), limits=Limits(start_s=1e9, alone_s=3.0),
        offers=(Offer(name="v4-8", zone=ZONE, accelerator_type="v4-8", hosts_per_slice=1,
                      runtime="tpu-ubuntu2204-base", num_chips=4),),
    )  # fmt: skip
    begin(spec, stage.stage(f"{url}/code"), "")
    slices = Slices(spec, print, QUICK)
    while not tpu.active():
        slices.step()
    slices.close()  # the supervisor is gone
    end = time.monotonic() + 120
    while tpu.resources:
        assert time.monotonic() < end, consoles(tmp_path)
        time.sleep(0.2)
    assert remote.state_of(spec)["status"] == "done"


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
@pytest.mark.slow  # gcloud takes seconds for each call
def test_gcloud_is_answered_and_asks_the_same(tpu, tmp_path):
    words = ["gcloud", "compute", "tpus", "queued-resources"]
    place = ["--project", "p", "--zone", ZONE, "--format", "json"]
    made = [*words, "create", "x", *place, "--node-id", "x", "--accelerator-type", "v4-16"]
    made += ["--runtime-version", "tpu-ubuntu2204-base", "--spot", "--async"]
    variables = os.environ | {"CLOUDSDK_CONFIG": str(tmp_path / "gcloud")}
    done = subprocess.run(made, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        [*words, "describe", "x", *place], env=variables, capture_output=True, text=True
    )
    assert json.loads(shown.stdout)["state"]["state"] in ("WAITING_FOR_RESOURCES", "PROVISIONING")
    theirs = tpu.bodies[-1]
    from lmwright.cloud.tpu_api import Tpus

    offer = Offer(
        name="v4-16", zone=ZONE, accelerator_type="v4-16", runtime="tpu-ubuntu2204-base",
        hosts_per_slice=2, num_chips=8,
    )  # fmt: skip
    Tpus(Cloud(project="p", capacity="spot")).create("y", "j", offer, {})
    ours = tpu.bodies[-1]
    assert ours.keys() >= {"tpu", "spot"} and theirs.keys() >= {"tpu", "spot"}
    node, other = (body["tpu"]["nodeSpec"][0]["node"] for body in (ours, theirs))
    for name in ("acceleratorType", "runtimeVersion"):
        assert node[name] == other[name]
    [listed] = Tpus(Cloud(project="p")).requests(ZONE)
    assert listed.id == "y"  # x is not of lmwright
    reserved = ["--reserved" if word == "--spot" else word for word in made]
    reserved[reserved.index("x")] = "z"
    assert subprocess.run(reserved, env=variables, capture_output=True).returncode == 0
    Tpus(Cloud(project="p", capacity="reserved")).create("w", "j", offer, {})
    theirs, ours = tpu.bodies[-2:]
    for name in ("spot", "guaranteed", "reservationName"):
        assert ours.get(name) == theirs.get(name)
