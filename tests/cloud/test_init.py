"""Set-up of a project, by a gcloud that writes its words down."""

from lmwright.cli.main import main
from lmwright.cloud import init
from lmwright.cloud.target import settings_path, settings_with

ZONE = "us-central2-b"


def fake_gcloud(tmp_path, monkeypatch, script):
    """A gcloud that writes its words down."""
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "gcloud"
    path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "said"


def test_cloud_init_makes_what_is_missing_and_writes_the_settings(tmp_path, monkeypatch, capsys):
    there = 'test "$3" != create || { echo "409: you already own it" >&2; exit 1; }'
    said = fake_gcloud(tmp_path, monkeypatch, there)
    words = ["cloud", "init", "--project", "p", "--zone", ZONE, "--bucket", "gs://b"]
    assert main([*words, "--dry-run"]) == 0 and not said.exists()
    assert main([*words, "--yes"]) == 0
    assert "service-accounts create lmwright --project=p --quiet" in said.read_text()
    for role in ("storage.objectAdmin", "storage.legacyBucketReader", "tpu.admin"):
        assert f"--role=roles/{role}" in said.read_text()
    assert "secretmanager.googleapis.com" in said.read_text()
    assert settings_with().service_account == "lmwright@p.iam.gserviceaccount.com"
    assert main([*words, "--yes"]) == 2
    assert "is there already" in capsys.readouterr().err


def test_cloud_init_stops_at_a_refusal(tmp_path, monkeypatch, capsys):
    fake_gcloud(tmp_path, monkeypatch, 'echo "ERROR: you lack permission" >&2; exit 1')
    words = ["cloud", "init", "--project", "p", "--zone", ZONE, "--bucket", "gs://b", "--yes"]
    assert main(words) == 2
    assert "gcloud services enable tpu.googleapis.com: ERROR: you lack" in capsys.readouterr().err
    assert not settings_path().exists()


def test_cloud_init_waits_for_no_question(tmp_path, monkeypatch, capsys):
    fake_gcloud(tmp_path, monkeypatch, "sleep 5")
    monkeypatch.setattr(init, "TIMEOUT_S", 0.2)
    words = ["cloud", "init", "--project", "p", "--zone", ZONE, "--bucket", "gs://b", "--yes"]
    assert main(words) == 2
    assert "did not end within 0.2 s; check the network" in capsys.readouterr().err
