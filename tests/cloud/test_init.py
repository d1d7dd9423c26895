"""Set-up of a project, by a gcloud that writes its words down."""

import pytest

from lmwright.cli.main import main
from lmwright.cloud import init
from lmwright.cloud.target import settings_path, settings_with

ZONE = "us-central2-b"
WORDS = ["cloud", "init", "--project", "p", "--zone", ZONE, "--bucket", "gs://b"]


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


NO_ACCOUNT = """
ERROR: (gcloud.services.enable) You do not currently have an active account selected.
Please run:

  $ gcloud auth login

to obtain new credentials.

If you have already logged in with a different account, run:

  $ gcloud config set account ACCOUNT

to select an already authenticated account to use."""
DENIED = """
ERROR: (gcloud.services.enable) PERMISSION_DENIED: Permission denied to enable service [x]
Help Token: AbC
- '@type': type.googleapis.com/google.rpc.ErrorInfo
  reason: AUTH_PERMISSION_DENIED"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (NO_ACCOUNT, "have an active account selected; log in with: gcloud auth login\n"),
        (DENIED, "PERMISSION_DENIED: Permission denied to enable service [x]\n"),
        (
            "ERREUR : acc\xe8s refus\xe9",
            "ERREUR : acc\ufffds refus\ufffd\n",
        ),  # another locale's bytes
        (
            "",
            "tpu.googleapis.com: no output, exit code 1; run the same command again\n",
        ),
        ("ERROR: (gcloud.x) Some requests did not succeed:\n - Required 'a.b'", "Required 'a.b'\n"),
    ],
)
def test_cloud_init_tells_the_reason_and_not_what_follows(
    tmp_path, monkeypatch, capsys, text, told
):
    """As gcloud 528 writes it."""
    (tmp_path / "text").write_text(text, encoding="latin-1")
    fake_gcloud(tmp_path, monkeypatch, f"cat {tmp_path}/text >&2; exit 1")
    assert main([*WORDS, "--yes"]) == 2
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize(("described", "code"), [(1, 2), (0, 0)])
def test_a_bucket_of_somebody_else_is_told(tmp_path, monkeypatch, capsys, described, code):
    """One of another project that this account may use will do."""
    taken = (
        "ERROR: HTTPError 409: The requested bucket name is not available. Please select another."
    )
    script = f'case "$3" in create) echo "{taken}" >&2; exit 1;; describe) exit {described};; esac'
    fake_gcloud(tmp_path, monkeypatch, script)
    assert main([*WORDS, "--yes"]) == code
    assert ("--bucket: gs://b is not yours" in capsys.readouterr().err) == bool(code)
    assert settings_path().exists() == (not code)


def test_a_service_account_is_waited_for(tmp_path, monkeypatch):
    """Others know it some time after it was made."""
    monkeypatch.setattr(init, "NEW_POLL_S", 0.01)
    error = (
        "ERROR: HTTPError 400: Service account lmwright@p.iam.gserviceaccount.com does not exist."
    )
    script = f"""case "$*" in *objectAdmin*)
      echo . >> {tmp_path}/tried; test $(wc -l < {tmp_path}/tried) -ge 3 && exit 0
      echo "{error}" >&2; exit 1;; esac"""
    fake_gcloud(tmp_path, monkeypatch, script)
    assert main([*WORDS, "--yes"]) == 0
    assert (tmp_path / "tried").read_text().count(".") == 3 and settings_path().exists()
    monkeypatch.setattr(init, "NEW_S", 0.0)
    settings_path().unlink()
    (tmp_path / "tried").unlink()
    assert main([*WORDS, "--yes"]) == 2 and not settings_path().exists()
