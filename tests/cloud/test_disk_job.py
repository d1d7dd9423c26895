"""A run on a slice that reads its data in place from a disk, and what its report says of time and
money: the real startup script mounts, the real training writes the report into a real bucket."""

import json
import shutil

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from lmwright.cli.main import main
from lmwright.cloud import remote
from lmwright.cloud.local import free_port
from lmwright.cloud.slices import Slices
from lmwright.storage.bucket import Bucket
from tests.cloud.played import run_in_bucket
from tests.cloud.test_disks import compute  # noqa: F401
from tests.cloud.test_tpu_job import QUICK, ZONE, consoles, tpu  # noqa: F401
from tests.report.test_paid import rows_of


@pytest.fixture
def run(small_run, url, compute, tmp_path):  # noqa: F811
    """A run in the bucket, whose data is on a disk."""
    return run_in_bucket(small_run, url, f"{compute.home}/mnt/wiki/data", tmp_path)


def launched(tmp_path, *words):
    options = ["--on", "v4-8", "--zone", ZONE, "--project", "p", "--name", "j", *words]
    return main(["launch", str(tmp_path / "run.toml"), *options])


def add_disk(compute, source):  # noqa: F811
    """A disk with prepared data, as somebody has made it."""
    compute.disks[ZONE, "wiki"] = {"name": "wiki", "type": "x/pd-balanced"}
    folder = compute.folder("wiki")
    shutil.copytree(source, folder / "data")
    (folder / "lost+found").mkdir()
    (compute.home / "dev/by-id/google-persistent-disk-1").symlink_to(folder)


@pytest.mark.slow  # a minute
def test_a_run_reads_a_disk_and_reports_its_cost(
    run, small_run, compute, tpu, host_python, tmp_path, monkeypatch, capsys  # noqa: F811
):  # fmt: skip
    monkeypatch.setattr(remote, "Slices", lambda spec, tell, _: Slices(spec, tell, QUICK))
    monkeypatch.setattr("lmwright.cloud.command.LEADER_PORT", free_port())
    tpu.hosts, tpu.speed = 1, 3
    add_disk(compute, small_run.data.dir)
    before = sorted((p, p.stat().st_mtime_ns) for p in compute.folder("wiki").rglob("*"))
    assert launched(tmp_path, "--disk", "wiki", "--spot") == 0, consoles(tmp_path)
    assert sorted((p, p.stat().st_mtime_ns) for p in compute.folder("wiki").rglob("*")) == before
    [disk] = tpu.bodies[0]["tpu"]["nodeSpec"][0]["node"]["dataDisks"]
    assert disk == {"sourceDisk": f"projects/p/zones/{ZONE}/disks/wiki", "mode": 2}  # READ_ONLY
    assert any(line.startswith("mount -o ro,noload") for line in compute.tools())
    assert not [name for name in Bucket(run.dir).entries() if "cache" in name]
    [session] = json.loads(Bucket(run.dir).read("sessions.json")[0])
    assert session["slice"]["chips"] == 4 and session["slice"]["price"] > 0
    assert session["slice"]["queue_s"] > 0
    page = tmp_path / "report.html"
    page.write_bytes(Bucket(run.dir).read("report.html")[0])
    rows = rows_of(page)
    names = ["productive", "start-up", "compile", "input", "eval", "save", "redone", "rest",
             "queue", "in all", "goodput", "chip-hours", "cost"]  # fmt: skip
    assert list(rows) == names
    [hours], [cost] = rows["chip-hours"], rows["cost"]
    assert 0 < float(hours) < 1 and cost.endswith(" USD by the list")
    assert rows["queue"][0].endswith(" s without a machine")
    capsys.readouterr()
    assert main(["jobs", "show", "j"]) == 0
    told = capsys.readouterr().out
    assert "    queue        " in told and "    chip-hours   " in told and "goodput" in told


def test_data_on_a_disk_that_is_not_given_is_refused(run, compute, tpu, tmp_path, capsys):  # noqa: F811
    assert launched(tmp_path, "--dry-run") == 2
    told = capsys.readouterr().err
    assert "is on disk wiki, and no --disk is given; add --disk wiki" in told
    assert launched(tmp_path, "--disk", "other", "--dry-run") == 2
    assert "and --disk names other; add --disk wiki" in capsys.readouterr().err
    assert launched(tmp_path, "--disk", "projects/p/zones/us-east5-a/disks/wiki") == 2
    assert "a disk serves its own zone only" in capsys.readouterr().err
    assert launched(tmp_path, "--disk", "Wiki") == 2
    assert "'Wiki' names no disk" in capsys.readouterr().err
    assert launched(tmp_path, "--disk", "wiki") == 2
    assert "there is no disk wiki in us-central2-b; make it: lmwright" in capsys.readouterr().err
    assert launched(tmp_path, "--disk", "wiki", "--disk", "wiki") == 2
    assert "wiki is named twice" in capsys.readouterr().err
    assert not any(call[0] == "POST" for call in tpu.calls)
    assert launched(tmp_path, "--disk", "wiki", "--dry-run") == 0
    assert f"projects/p/zones/{ZONE}/disks/wiki" in capsys.readouterr().out
