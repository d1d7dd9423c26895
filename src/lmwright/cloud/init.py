"""Set-up of a Google Cloud project for launching, by gcloud."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmwright.cloud.target import NO_GCLOUD, refuse_zone, settings_path
from lmwright.errors import UserError
from lmwright.guard.temporary import write_output
from lmwright.storage.bucket import is_bucket

ACCOUNT = "lmwright"
APIS = ("tpu.googleapis.com", "storage.googleapis.com", "iam.googleapis.com")
APIS += ("secretmanager.googleapis.com", "cloudresourcemanager.googleapis.com")
APIS += ("compute.googleapis.com",)
# Saving a checkpoint looks up the bucket, which the first alone does not allow.
OF_BUCKET = ("roles/storage.objectAdmin", "roles/storage.legacyBucketReader")
TIMEOUT_S = 300.0
NEW_S, NEW_POLL_S = 90.0, 5.0  # until others know a service account that was just made
PRESENT = ("already exists", "already own it", "HTTPError 409")
FOREIGN = "bucket name is not available"
LOOK = ("gcloud", "storage", "buckets", "describe")
LOGIN = "gcloud auth login"


@dataclass(frozen=True)
class Setup:
    """Project, zone and bucket that launching uses."""

    project: str
    zone: str
    bucket: str
    """Address of the bucket, gs://NAME."""

    @property
    def account(self) -> str:
        return f"{ACCOUNT}@{self.project}.iam.gserviceaccount.com"

    def commands(self) -> list[list[str]]:
        """gcloud commands, in order; what is there already stays as it is."""
        project, member = f"--project={self.project}", f"--member=serviceAccount:{self.account}"
        region = self.zone.rpartition("-")[0]
        grant = ["gcloud", "projects", "add-iam-policy-binding", self.project, member]
        return [
            ["gcloud", "services", "enable", *APIS, project],
            ["gcloud", "storage", "buckets", "create", self.bucket, project,
             f"--location={region}", "--uniform-bucket-level-access"],
            ["gcloud", "iam", "service-accounts", "create", ACCOUNT, project],
            *(["gcloud", "storage", "buckets", "add-iam-policy-binding", self.bucket, member,
               f"--role={role}"] for role in OF_BUCKET),
            [*grant, "--role=roles/tpu.admin", "--condition=None"],
            # A VM that supervises asks for slices with its own account, and deletes itself.
            [*grant, "--role=roles/compute.instanceAdmin.v1", "--condition=None"],
            ["gcloud", "iam", "service-accounts", "add-iam-policy-binding", self.account, project,
             member, "--role=roles/iam.serviceAccountUser"],
        ]  # fmt: skip


def init_command(
    project: str, zone: str, bucket: str, agree: Callable[[], bool], *, dry_run: bool = False
) -> int:
    """Shows what launching needs, makes it once `agree()` says so, and writes the settings."""
    refuse_zone(zone)
    if not is_bucket(bucket) or bucket.count("/") != 2:
        raise UserError(f"--bucket: {bucket!r} is not a bucket; write gs://NAME")
    setup, path = Setup(project, zone, bucket), settings_path()
    print("\n".join(" ".join(command) for command in setup.commands()))
    print(f"and write {path}")
    if path.exists():
        raise UserError(f"{path}: is there already; change it by hand, or remove it first")
    if dry_run or not agree():
        return 0
    if shutil.which("gcloud") is None:
        raise UserError(NO_GCLOUD)
    for command in setup.commands():
        _do(command, setup)
        print(f"done: {' '.join(command[:4])}")
    lines = {"project": project, "zone": zone, "bucket": f"{bucket}/lmwright"}
    lines["service_account"] = setup.account
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, text)
    print(f"wrote {path}; try: lmwright launch run.toml --on v4-8 --dry-run")
    return 0


def _do(command: Sequence[str], setup: Setup) -> None:
    """Runs a command of gcloud. Raises UserError where it refuses."""
    end = time.monotonic() + NEW_S
    while True:
        done, name = _gcloud(command), " ".join(command[:4])
        if not done.returncode:
            return
        new = setup.account in done.stderr and "does not exist" in done.stderr
        if not new or time.monotonic() > end:
            break
        time.sleep(NEW_POLL_S)
    if FOREIGN in done.stderr and _gcloud([*LOOK, setup.bucket]).returncode:
        raise UserError(
            f"--bucket: {setup.bucket} is not yours: all users of the service share the names of "
            "buckets; choose another name"
        )
    if not any(word in done.stderr for word in PRESENT):
        none = f"no output, exit code {done.returncode}; run the same command again"
        raise UserError(f"{name}: {_reason(done.stderr) or none}")


def _gcloud(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            [*command, "--quiet"], capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, timeout=TIMEOUT_S,
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"gcloud: cannot be started ({error.strerror}); install it again") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{' '.join(command[:4])}: did not end within {TIMEOUT_S:g} s; check the network, "
            "and run the same command again"
        ) from None


def _reason(text: str) -> str:
    """Reason that gcloud gives for an error, without the advice and the details that follow it;
    empty where it gives none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    at = next((n for n, line in enumerate(lines) if line.startswith("ERROR:")), len(lines) - 1)
    reason = lines[at]
    if reason.endswith(":") and lines[at + 1 :]:
        reason += f" {lines[at + 1].removeprefix('- ')}"
    login = "; log in with: gcloud auth login" if LOGIN in text and LOGIN not in reason else ""
    return reason.rstrip(".") + login if login else reason
