"""Data disks: a helper VM fills them from the real storage server, and hosts mount them."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from lmwright.cli.main import main
from lmwright.cloud import compute_api, disks, fill, filler
from lmwright.cloud.book import begin
from lmwright.cloud.compute_api import Compute
from lmwright.cloud.disk_check import STATE, check_disks
from lmwright.cloud.spec import Cloud, Offer, Spec
from lmwright.cloud.tpu_api import NO_CREDENTIALS
from lmwright.data.rows.store import verify_store
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from tests.cloud.fake_compute import FakeCompute
from tests.cloud.fake_tpu import TOKEN

ZONE = "us-central2-b"
PLACE = ["--zone", ZONE, "--project", "p"]
VM = "lmwright-fill-wiki"


@pytest.fixture
def compute(monkeypatch, tmp_path):
    service = FakeCompute(tmp_path / "compute")
    monkeypatch.setenv(compute_api.ENDPOINT, f"http://{service.server.address}/compute/v1/")
    monkeypatch.setenv(NO_CREDENTIALS, "true")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(fill, "POLL_S", 0.1)
    monkeypatch.setattr(compute_api, "PAUSE_S", 0.01)
    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)
    yield service
    service.close()


@pytest.fixture
def data(small_run, url):
    """Prepared data in the bucket."""
    assert main(["data", "push", small_run.data.dir, f"{url}/data"]) == 0
    return f"{url}/data"


def push(source, *words, url):
    return main(["data", "push", source, "disk:wiki", *PLACE, "--bucket", f"{url}/l", *words])


@pytest.fixture
def helper(compute, monkeypatch):
    """A helper VM that is a thread of this process, in place of one with its startup script."""
    facts = {}
    monkeypatch.setattr(filler.metadata, "attribute", facts.get)
    monkeypatch.setattr(fill, "stage", lambda root: f"{root}/abc")

    def boot(_zone, _name, metadata):
        facts.update(metadata)
        threading.Thread(target=filler.main, daemon=True).start()

    compute.play = boot


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow  # the helper installs
def test_a_disk_is_filled_verified_and_left_to_nobody(compute, data, url, host_python, capsys):
    compute.failing = [503, 429]
    assert push(data, url=url) == 0, compute.console(VM)
    out = capsys.readouterr().out
    assert "copied and verified" in out and "--disk wiki" in out
    assert compute.instances == {} and not compute.hosts
    disk = compute.disks[ZONE, "wiki"]
    assert disk["labels"][STATE] == "filled" and disk["sizeGb"] == "10"
    assert {v.stage for v in verify_store(compute.folder("wiki"))} >= {"pack", "shuffle"}
    held = json.loads((compute.folder("wiki") / disks.MARK).read_text())
    assert held["name"] == "wiki" and held["source"] == data
    vm = compute.bodies[1]
    assert vm["scheduling"]["instanceTerminationAction"] == "DELETE"
    assert int(vm["scheduling"]["maxRunDuration"]["seconds"]) >= 3600
    assert [disk["autoDelete"] for disk in vm["disks"]] == [True, False]
    tools = [line.split()[0] for line in compute.tools()]
    assert [tool for tool in tools if tool in ("mkfs.ext4", "mount", "umount")] == [
        "mkfs.ext4", "mount", "umount", "mount", "umount",
    ]  # fmt: skip
    assert TOKEN not in json.dumps(compute.bodies) + out
    # Again: nothing is made.
    assert push(data, url=url) == 0
    assert "holds this store already" in capsys.readouterr().out
    assert len(compute.bodies) == 2


def test_a_store_of_this_machine_goes_through_the_bucket(compute, helper, small_run, url):
    kind = ["--disk-type", "hyperdisk-ml"]
    assert push(small_run.data.dir, *kind, url=url) == 0, compute.console(VM)
    assert "pack/manifest.json" in Bucket(f"{url}/l/data/wiki").entries()
    assert compute.disks[ZONE, "wiki"]["accessMode"] == "READ_ONLY_MANY"
    assert compute.bodies[1]["machineType"].endswith("/c3-standard-4")


@pytest.mark.slow  # the helper installs
def test_the_helper_ends_itself_where_the_client_is_gone(compute, data, url, host_python, capsys):
    filling = fill.plan_filling(
        data, "disk:wiki", fill.Settings(project="p", zone=ZONE, bucket=f"{url}/l"), "pd-balanced"
    )
    client = Compute("p")
    client.make(ZONE, "disks", filling.disk())
    code = fill.stage(f"{url}/l/code")
    fill.machines.make(client, filling.vm(code, compute.disks[ZONE, "wiki"]["id"]))
    until(lambda: not compute.instances)
    assert compute.disks[ZONE, "wiki"]["labels"][STATE] == "filling"  # nobody has looked
    assert push(data, url=url) == 0
    assert "going on with an interrupted push" in capsys.readouterr().out
    assert len(compute.bodies) == 2  # no second helper
    assert compute.disks[ZONE, "wiki"]["labels"][STATE] == "filled"


@pytest.mark.slow  # the helper installs
def test_a_helper_that_may_not_delete_itself_is_switched_off(compute, data, url, host_python):
    compute.may_delete = False
    filling = fill.plan_filling(
        data, "disk:b", fill.Settings(project="p", zone=ZONE, bucket=f"{url}/l"), "pd-balanced"
    )
    client = Compute("p")
    client.make(ZONE, "disks", filling.disk())
    fill.machines.make(client, filling.vm(fill.stage(f"{url}/l/code"), "7"))
    until(lambda: any(line.startswith("poweroff") for line in compute.tools()))
    until(lambda: fill.machines.state(client, ZONE, "lmwright-fill-b") == "TERMINATED")


@pytest.mark.slow  # the helper installs, three times
def test_an_interrupted_push_is_named_and_goes_on(compute, data, url, host_python, capsys):
    def enemy():
        """The VM ends while it copies."""
        until(lambda: any(line.startswith("mkfs") for line in compute.tools()))
        compute.end(ZONE, VM)

    thread = threading.Thread(target=enemy)
    thread.start()
    assert push(data, url=url) == 2
    thread.join()
    told = capsys.readouterr()
    assert "its helper VM is TERMINATED" in told.err and "push again" in told.err
    assert compute.instances == {} and compute.disks[ZONE, "wiki"]["labels"][STATE] == "filling"
    # Another push tells of it.
    assert main(["data", "push", data, "disk:other", *PLACE, "--bucket", f"{url}/l"]) == 0
    assert "note: disk wiki was not filled to its end" in capsys.readouterr().out
    with pytest.raises(UserError, match="wiki in us-central2-b is not filled yet; continue with"):
        check_disks(job(url, "wiki"))
    assert push(data, url=url) == 0
    assert "going on" in capsys.readouterr().out
    assert [line.split()[0] for line in compute.tools()].count("mkfs.ext4") == 2


def test_what_fails_leaves_nothing_that_costs(compute, helper, data, url, capsys):
    compute.full = True
    assert push(data, url=url) == 2
    assert "Quota 'CPUS' exceeded" in capsys.readouterr().err
    assert compute.disks == {} and compute.instances == {}
    compute.full = False
    name = next(n for n in Bucket(data).entries() if n.endswith(".npy") or n.endswith(".bin"))
    bytes_there = Bucket(data).read(name)[0]
    Bucket(data).write(name, bytes(len(bytes_there)))
    assert push(data, url=url) == 2
    assert f"{data}/{name} was altered" in capsys.readouterr().err
    assert compute.disks == {} and compute.instances == {}


def test_what_is_refused(compute, data, url, small_run, tmp_path, capsys):
    for words, told in (
        ([data, "disk:Wiki"], "'Wiki' cannot name a disk"),
        ([data, "disk:w" + "i" * 60], "is too long for the name of a VM"),
        ([f"{url}/none", "disk:wiki"], "holds no finished stage"),
        ([str(tmp_path), "disk:wiki"], "the helper VM reads from a bucket; push it there first"),
        ([data, f"{url}/x", "--dry-run"], "--dry-run is for a TARGET disk:NAME"),
        ([data, "wiki"], "is not a bucket; write gs://BUCKET/FOLDER, or disk:NAME"),
    ):
        words += PLACE if words[1].startswith("disk") else []
        assert main(["data", "push", *words]) == 2
        assert told in capsys.readouterr().err
    assert main(["data", "push", data, "disk:wiki", "--project", "p"]) == 2
    assert "--zone: missing" in capsys.readouterr().err
    words = ["data", "push", data, "disk:wiki", "--project", "p", "--zone"]
    assert main([*words, "us-west9-z"]) == 2
    assert "project p has no zone us-west9-z" in capsys.readouterr().err
    assert main([*words, "a,b"]) == 2
    assert "is not one zone" in capsys.readouterr().err
    assert push(data, "--dry-run", "--disk-type", "ssd", url=url) == 2
    assert "'ssd'; choose one of pd-balanced, hyperdisk-ml, hyper" in capsys.readouterr().err
    compute.allowed = False
    assert push(data, url=url) == 2
    assert "roles/compute.instanceAdmin.v1" in capsys.readouterr().err
    compute.allowed = True
    compute.failing = [503] * 9
    assert push(data, url=url) == 2
    assert "Compute Engine does not answer (try again)" in capsys.readouterr().err
    compute.failing = []
    for labels, told in (
        ({}, "which lmwright did not make; choose another name"),
        ({STATE: "filled", "lmwright-store": "x"}, "already with another store"),
        ({STATE: "filling", "lmwright-store": "x"}, "already with half of another store"),
    ):
        compute.disks[ZONE, "wiki"] = {"name": "wiki", "labels": labels}
        assert push(data, url=url) == 2
        assert told in capsys.readouterr().err
    assert compute.bodies == []


def test_a_dry_run_prints_the_requests(compute, small_run, data, url, capsys):
    assert push(small_run.data.dir, "--dry-run", "--disk-type", "hyperdisk-ml", url=url) == 0
    out = capsys.readouterr().out
    for told in ("POST projects/p/zones/us-central2-b/disks", '"sizeGb": "10"', "c3-standard-4",
                 "DELETE projects/p/zones/us-central2-b/instances/lmwright-fill-wiki",
                 f"would copy {small_run.data.dir} to {url}/l/data/wiki", "READ_ONLY_MANY",
                 f"would read {url}/l/disks/wiki.json"):  # fmt: skip
        assert told in out
    assert compute.calls == []


def job(url, *names, accelerator="v4-8"):
    return Spec(
        name="j", dir="", command=("true",), hosts=1, port=0, url=f"{url}/jobs/j",
        cloud=Cloud(project="p", disks=names),
        offers=(Offer(name=accelerator, zone=ZONE, accelerator_type=accelerator, runtime="r",
                      hosts_per_slice=1, num_chips=4),),
    )  # fmt: skip


def test_disks_of_a_job_are_looked_at(compute, url):
    disk = {"type": "x/pd-balanced", "labels": {}}
    with pytest.raises(UserError, match="there is no disk wiki in us-central2-b; make it"):
        check_disks(job(url, "wiki"))
    compute.disks[ZONE, "wiki"] = {"name": "wiki", **disk}
    assert check_disks(job(url, "wiki")) == []
    for name in ("v6e-8", "V6E"):  # with a topology it is the API's word
        with pytest.raises(UserError, match=f"pd-balanced, which {name} does not attach"):
            check_disks(job(url, "wiki", accelerator=name))
    disk = {"type": "x/hyperdisk-ml", "accessMode": "READ_WRITE_SINGLE"}
    compute.disks[ZONE, "wiki"] = {"name": "wiki", **disk}
    with pytest.raises(UserError, match="--access-mode=READ_ONLY_MANY"):
        check_disks(job(url, "wiki", accelerator="v6e-8"))
    compute.allowed = False
    [note] = check_disks(job(url, "wiki"))
    assert "it is not known whether disk wiki is there" in note


@pytest.fixture
def host(compute, url, monkeypatch):
    """A host whose job has disks; call it as the startup script does."""
    monkeypatch.setattr(disks.metadata, "tpu_env", lambda: {"WORKER_ID": "0"})
    monkeypatch.setattr(disks.metadata, "attribute", lambda name: f"{url}/jobs/j")
    return lambda *names: begin(job(url, *names), "", "") or disks.main(within_s=0.1)


@pytest.mark.parametrize("device", ["by-id/google-wiki", "by-label/wiki",
                                    "by-id/google-persistent-disk-1"])  # fmt: skip
def test_disks_are_mounted_read_only_once(compute, host, device, capsys):
    compute.folder("wiki").mkdir(parents=True)
    (compute.folder("wiki") / "lost+found").mkdir()
    (compute.home / "dev" / device).parent.mkdir(exist_ok=True)
    (compute.home / "dev" / device).symlink_to(compute.folder("wiki"))
    host("wiki")
    target = compute.home / "mnt" / "wiki"
    assert target.is_symlink() and (target / "lost+found").is_dir()
    disks.main()  # the next boot of a host that is mounted
    assert [line for line in compute.tools() if line.startswith("mount ")] == [
        f"mount -o ro,noload {compute.home}/dev/{device} {target}"
    ]
    assert capsys.readouterr().out.count(f"disk wiki: mounted at {target}") == 2


def test_a_disk_that_cannot_be_mounted_fails_the_job(compute, host, url):
    host("projects/p/zones/us-central2-b/disks/wiki")
    state = json.loads(Bucket(f"{url}/jobs/j").read("state.json")[0])
    assert state["status"] == "failed" and "disk wiki: its device is not there" in state["error"]
    compute.folder("wiki").mkdir(parents=True)
    (compute.home / "dev/by-id/google-wiki").symlink_to(compute.folder("wiki"))
    with pytest.raises(UserError, match=r"mount .*unknown filesystem"):
        disks.mount_disk("wiki", 1, 0.1)
    (compute.folder("wiki") / "lost+found").mkdir()
    (compute.folder("wiki") / disks.MARK).write_text('{"name": "other"}')
    with pytest.raises(UserError, match="holds disk other; check --disk"):
        disks.mount_disk("wiki", 1, 0.1)
    assert os.listdir(compute.home / "mnt" / "wiki") == []


def test_a_disk_is_filled_once_and_goes_on_where_it_was(compute, helper, data, url, capsys):
    name = next(n for n in Bucket(data).entries("pack") if n.startswith("pack/train"))
    whole = Bucket(data).read(name)[0]
    assert push(data, url=url) == 0
    assert "copied and verified" in capsys.readouterr().out
    assert (compute.folder("wiki") / name).read_bytes() == whole
    # A file that differs and one that is missing are copied again, and the disk is not formatted.
    compute.disks[ZONE, "wiki"]["labels"][STATE] = "filling"
    Bucket(f"{url}/l/disks").remove("wiki.json")
    (compute.folder("wiki") / name).write_bytes(bytes(len(whole)))
    (compute.folder("wiki") / "pack/manifest.json").unlink()
    before = (compute.folder("wiki") / "tokenizer/tokenizer.json").stat()
    assert push(data, url=url) == 0
    assert (compute.folder("wiki") / name).read_bytes() == whole
    assert (compute.folder("wiki") / "tokenizer/tokenizer.json").stat() == before
    assert [line.split()[0] for line in compute.tools()].count("mkfs.ext4") == 1


def test_ctrl_c_keeps_the_disk_and_ends_the_helper(compute, helper, data, url, monkeypatch, capsys):
    compute.play = lambda *_: None  # it says nothing
    looks = iter([0.0, KeyboardInterrupt])

    def sleep(_):
        if next(looks):
            raise KeyboardInterrupt

    monkeypatch.setattr(fill, "time", type("Clock", (), {"sleep": staticmethod(sleep),
                                                         "monotonic": time.monotonic}))  # fmt: skip
    assert push(data, url=url) not in (0, 2)
    out = capsys.readouterr().out
    assert "disk wiki is half filled and costs money; push again" in out
    assert compute.instances == {} and (ZONE, "wiki") in compute.disks


REAL = """
import errno, sys
from pathlib import Path
from lmwright.cloud import disks, filler
from lmwright.data.rows.store import verify_store
from lmwright.storage.bucket import Bucket

filler.fill(sys.argv[1], "wiki", filler.Report(Bucket(sys.argv[2]), "wiki.json", {}))
for _ in range(2):
    target = disks.mount_disk("wiki", 1)
print(len(verify_store(target)), Path("/proc/mounts").read_text().count(f" {target} ext4 ro,"))
try:
    (target / "x").touch()
except OSError as error:
    print(errno.errorcode[error.errno])
"""


@pytest.mark.slow  # a file system
def test_with_a_real_file_system(data, url, tmp_path):
    """The real mkfs.ext4, blkid and mount, on a file, where this machine lets us."""
    (tmp_path / "dev/by-id").mkdir(parents=True)
    disk = tmp_path / "dev/by-id/google-wiki"
    with open(disk, "wb") as file:
        file.truncate(64 << 20)
    probe = f"mkfs.ext4 -q {tmp_path}/p 8M && mkdir {tmp_path}/m && mount {tmp_path}/p {tmp_path}/m"
    alone = ["unshare", "--mount"]  # mounts end with their process
    if shutil.which("unshare") is None or subprocess.run([*alone, "sh", "-c", probe]).returncode:
        pytest.skip("this machine lets us mount nothing")
    places = {"LMWRIGHT_DISKS": f"{tmp_path}/mnt", "LMWRIGHT_DEVICES": f"{tmp_path}/dev"}
    words = [*alone, sys.executable, "-c", REAL, data, f"{url}/l"]
    done = subprocess.run(words, env=os.environ | places, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["5 1", "EROFS"], done.stderr
    label = subprocess.run(["blkid", "-o", "value", "-s", "LABEL", disk], capture_output=True)
    assert label.stdout == b"wiki\n"


def test_a_client_without_a_network_leaves_the_work_to_the_helper(
    compute, helper, data, url, monkeypatch, capsys
):
    def cut(_):
        compute.failing = [503] * 99

    clock = type("Clock", (), {"sleep": staticmethod(cut), "monotonic": time.monotonic})
    compute.play = lambda *_: None
    monkeypatch.setattr(fill, "time", clock)
    assert push(data, url=url) == 2
    told = capsys.readouterr()
    assert "Compute Engine does not answer" in told.err
    assert f"helper VM {VM} deletes itself at its end" in told.out
    assert "disk wiki is half filled and costs money; push again" in told.out
    assert (ZONE, "wiki") in compute.disks and (ZONE, VM) in compute.instances
