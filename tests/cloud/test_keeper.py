"""The supervisor on a VM: made, named, waited for by others, gone at the end."""

import json

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from lmwright.cli.main import main
from lmwright.cloud import remote, standby
from lmwright.cloud.book import MADE, begin
from lmwright.cloud.keeper import RECORD, vm_of
from lmwright.cloud.local import free_port
from lmwright.cloud.slices import Slices
from lmwright.cloud.spec import START, Cloud, Limits, Offer, Spec, save_spec
from lmwright.cloud.stage import stage
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from lmwright.storage.claim import Claimed
from tests.cloud.fake_tpu import TOKEN
from tests.cloud.test_disks import compute, until  # noqa: F401
from tests.cloud.test_tpu_job import QUICK, ZONE, tpu  # noqa: F401


@pytest.fixture
def spec(url, tpu, compute):  # noqa: F811
    tpu.hosts = 1
    spec = Spec(
        name="j", dir="", command=("python", "-c", "print(1)"), hosts=1, port=free_port(),
        url=f"{url}/jobs/j", limits=Limits(start_s=1e9, alone_s=600.0),
        cloud=Cloud(project="p", service_account="me@p"),
        offers=(Offer(name="v4-8", zone=ZONE, accelerator_type="v4-8", hosts_per_slice=1,
                      runtime="tpu-ubuntu2204-base", num_chips=4, price=3.0),),
    )  # fmt: skip
    begin(spec, f"{url}/code/abc", "")
    save_spec(spec)
    return spec


def follow(*words):
    return main(["jobs", "follow", "j", "--on-vm", *words])


def test_a_dry_run_makes_nothing(spec, compute, capsys):  # noqa: F811
    assert follow("--dry-run") == 0
    out = capsys.readouterr().out
    assert f"would write {spec.url}/vm.json" in out
    assert f"would call POST projects/p/zones/{ZONE}/instances" in out
    assert "e2-micro" in out and '"email": "me@p"' in out and spec.token not in out
    assert compute.calls == [] and Bucket(spec.url).read(RECORD) is None


def test_it_is_made_once_named_and_deleted(spec, compute, capsys):  # noqa: F811
    compute.play = lambda *_: None
    assert follow() == 0
    name = vm_of(spec, "", "").name
    [body] = compute.bodies
    assert body["name"] == name and body["scheduling"] == {}
    facts = {item["key"]: item["value"] for item in body["metadata"]["items"]}
    assert facts["lmwright-job"] == spec.url
    assert facts["lmwright-code"] == json.loads(Bucket(spec.url).read(MADE)[0])["code"]
    assert spec.token not in json.dumps(body)
    assert follow() == 0
    assert f"VM {name} in {ZONE} supervises it already (RUNNING)" in capsys.readouterr().out
    assert follow("--zone", "us-east5-a") == 2
    assert f"its VM {name} is in {ZONE} already" in capsys.readouterr().err
    assert main(["jobs", "show", "j"]) == 0
    assert f"supervisor VM  {name} in {ZONE}: RUNNING" in capsys.readouterr().out
    compute.allowed = False
    assert main(["jobs", "show", "j"]) == 0
    assert f"supervisor VM  {name} in {ZONE}: not known" in capsys.readouterr().out
    assert main(["jobs", "forget", "j", "--kill"]) == 2  # nothing is forgotten that may cost
    assert Bucket(spec.url).read(RECORD) is not None
    compute.allowed = True
    assert main(["jobs", "forget", "j", "--kill"]) == 0
    assert compute.instances == {} and Bucket(spec.url).entries() == {}


def test_what_is_refused(spec, compute, capsys):  # noqa: F811
    assert follow("--zone", "nowhere") == 2
    assert "'nowhere' is not a zone" in capsys.readouterr().err
    assert follow("--zone", "us-west9-z") == 2
    assert "has no zone us-west9-z" in capsys.readouterr().err
    assert main(["jobs", "follow", "j", "--zone", ZONE]) == 2
    assert "are for --on-vm" in capsys.readouterr().err
    Bucket(spec.url).write("state.json", json.dumps(START | {"status": "done"}))
    assert follow() == 2
    assert "job j is done; resume it first" in capsys.readouterr().err
    with pytest.raises(UserError, match="is not on TPU slices; follow it from here"):
        vm_of(Spec(name="x", dir="", command=(), hosts=1, port=0), "", "")
    assert compute.bodies == []


def test_a_vm_waits_for_another_supervisor_and_takes_over(spec, monkeypatch, capsys):
    other, pauses = Slices(spec, print, QUICK), []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            other.close()  # it is gone
        assert len(pauses) < 9

    monkeypatch.setattr(standby.time, "sleep", pause)
    monkeypatch.setattr(remote.Slices, "run", lambda self: finish(spec))
    standby.watch(spec.url)
    assert len(pauses) == 2 and capsys.readouterr().out.count("waiting: ") == 2
    for name in Bucket(spec.url).entries():
        Bucket(spec.url).remove(name)
    standby.watch(spec.url)  # a job that was forgotten


def finish(spec):
    state = START | {"status": "done"}
    Bucket(spec.url).write("state.json", json.dumps(state))
    return state


@pytest.mark.slow  # two machines install, and the supervisor looks each 15 s
def test_a_vm_supervises_a_job_to_its_end(spec, url, compute, tpu, host_python, capsys):  # noqa: F811
    book = json.loads(Bucket(spec.url).read(MADE)[0])
    Bucket(spec.url).write(MADE, json.dumps(book | {"code": stage(f"{url}/code")}))
    assert follow() == 0
    name = vm_of(spec, "", "").name
    until(lambda: tpu.resources, 120)
    with pytest.raises(Claimed):
        Slices(spec, print, QUICK)
    assert main(["jobs", "show", "j"]) == 0
    assert f"supervisor VM  {name} in {ZONE}: RUNNING" in capsys.readouterr().out
    until(lambda: not compute.instances, 300)
    assert remote.state_of(spec)["status"] == "done" and tpu.resources == {}
    assert TOKEN not in compute.console(name) + json.dumps(compute.bodies)
    assert main(["jobs", "show", "j"]) == 0
    assert "supervisor VM" not in capsys.readouterr().out
    assert main(["jobs", "forget", "j"]) == 0
