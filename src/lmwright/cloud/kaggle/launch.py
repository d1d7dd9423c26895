"""Launching at Kaggle: a run becomes private datasets and a kernel, and its first session begins.

Nothing is made there before the run is planned for the free TPU and the token, the quota and every
file have been looked at.
"""

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lmwright.cloud.kaggle.job import FACTS, LEAST_SESSION_S, kernels_of, look, quota_line
from lmwright.cloud.kaggle.parcel import PLACEHOLDER, Archive, Parcel, pack, refuse_unsent
from lmwright.cloud.kaggle.push import script, write_kernel
from lmwright.cloud.kaggle.service import (
    ACCELERATOR,
    ALIVE,
    ON,
    Kaggle,
    Unreachable,
)
from lmwright.cloud.package import PYTHON
from lmwright.cloud.spec import Limits, Spec, read_state, remove_job, save_spec
from lmwright.cloud.store_check import check_stores
from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.guard.temporary import temporary_folder
from lmwright.storage.kaggle_client import check_client, check_token

TARGET = "kaggle"
DEVICES = 8


def launch(run: Run, name: str, limits: Limits, *, dry_run: bool = False) -> Spec | None:
    """Sends a run and starts its first session; None after a dry run. Raises UserError for
    anything that would fail there and can be known here."""
    if not dry_run:
        check_client(ON)
        check_token(ON)
    refuse_unsent(run)
    check_stores(run, here=True)
    run, seconds = plan(run)
    with temporary_folder() as folder:
        parcel = pack(run, Path(folder))
        told = settings(name, parcel, limits)
        if dry_run:
            print("\n".join(describe(name, parcel, told, seconds)))
            return None
        try:
            return _launch(run, name, limits, parcel, told, seconds)
        except Unreachable as error:
            raise UserError(f"--on {TARGET}: {error}; launch again later") from None


def plan(run: Run) -> tuple[Run, float]:
    """The run with a session's hours, and the seconds of a session; the plan is printed. Raises
    UserError if the run does not fit, or asks for a longer session than there is."""
    from lmwright.planner.analytic.machine import known_as
    from lmwright.planner.command import Wanted, plan_command

    alias = known_as(TARGET)
    assert alias is not None
    hours = run.limits.session_hours or alias.hours
    if hours > alias.hours:
        raise UserError(
            f"limits.session_hours: {hours:g}: Kaggle ends a session with a TPU after "
            f"{alias.hours:g} hours, and then keeps nothing of it; set at most that, or leave it "
            "out"
        )
    if plan_command(run, Wanted(on=TARGET, quick=True)):
        raise UserError(f"--on {TARGET}: the run does not fit its TPU; see the suggestions above")
    return replace(run, limits=replace(run.limits, session_hours=hours)), hours * 3600


def _launch(
    run: Run, name: str, limits: Limits, parcel: Parcel, told: dict[str, Any], seconds: float
) -> Spec:
    service = Kaggle()
    quota = service.quota()
    print(quota_line(quota))
    if quota is not None and quota.left_s < min(LEAST_SESSION_S, seconds):
        raise UserError(f"--on {TARGET}: {quota_line(quota)}; launch again when there is more")
    for kernel in kernels_of(service.user, name):
        session = service.session(kernel)
        if session is not None and session.state in ALIVE:
            raise UserError(
                f"--name: kernel {kernel} is {session.state.lower()} at Kaggle already; stop it "
                "there, or choose another name"
            )
    directory = run.dir if "://" in run.dir else os.path.abspath(run.dir)
    spec = Spec(name=name, dir=directory, command=("train",), hosts=1, port=0, limits=limits)
    facts = {
        "user": service.user,
        "datasets": [archive.slug for archive in parcel.archives],
        "settings": told,
        "seconds": seconds,
    }
    save_spec(spec, {FACTS: json.dumps(facts, indent=1)})
    try:
        send(service, parcel)
        look(spec, service)
    finally:
        begun = "pushed" in read_state(spec)
        if not begun:  # what was sent is found again by the next launch
            remove_job(spec)
    if not begun:
        raise UserError(f"--on {TARGET}: {quota_line(service.quota())}; launch again later")
    return spec


def settings(name: str, parcel: Parcel, limits: Limits) -> dict[str, Any]:
    """Settings of the script of a job, without those of a session."""
    return {
        "job": name,
        "machine": TARGET,
        "accelerator": ACCELERATOR,
        "platforms": "tpu,cpu",
        "devices": DEVICES,
        "python": PYTHON,
        "no_index": True,
        "work": "",
        "inputs": ["/kaggle/input"],
        "output": "/kaggle/working",
        "packages": [archive.name for archive in parcel.archives if not archive.folder],
        "archives": {a.name: a.folder for a in parcel.archives if a.folder},
        "files": [archive.name for archive in parcel.archives],
        "secrets": list(parcel.secrets),
        "hosts": list(parcel.hosts),
        "placeholder": PLACEHOLDER,
        "run": parcel.run,
        "dir": parcel.dir,
        "limits": asdict(limits),
    }


def send(service: Kaggle, parcel: Parcel) -> None:
    """Makes the private datasets that are not there yet."""
    for archive in parcel.archives:
        if service.has_dataset(archive.slug):
            service.wait_for_dataset(archive.slug)
            continue
        folder = _outbox() / archive.slug
        path = archive.write(folder)
        print(f"sending {archive.slug} ({path.stat().st_size / 1e6:,.1f} MB)", flush=True)
        service.make_dataset(archive.slug, folder)
        shutil.rmtree(folder)


def _outbox() -> Path:
    """Folder of archives that are being sent; an upload that broke off goes on from there."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "lmwright", "kaggle")


def describe(name: str, parcel: Parcel, told: dict[str, Any], seconds: float) -> list[str]:
    """Everything that launching would do."""
    lines = [f"would make private dataset {_described(archive)}" for archive in parcel.archives]
    kernel = kernels_of("USER", name)[0]
    with temporary_folder() as folder:
        datasets = [f"USER/{archive.slug}" for archive in parcel.archives]
        write_kernel(Path(folder), kernel, script(told), datasets, [])
        metadata = (Path(folder) / "kernel-metadata.json").read_text()
    lines += [f"would push kernel {kernel} for {seconds / 3600:.1f} h:", metadata]
    lines += [f"the kernel would need the secret {secret}" for secret in parcel.secrets]
    return [*lines, "with run file:", parcel.run]


def _described(archive: Archive) -> str:
    if not archive.files:
        return f"{archive.slug}: Python and all packages"
    return f"{archive.slug}: {len(archive.files)} files, {archive.size / 1e6:,.1f} MB"
