"""Command `lmwright launch`."""

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmwright.cloud import checks, local, remote
from lmwright.cloud.disk_names import refuse_other_zones
from lmwright.cloud.gke import target as gke_target
from lmwright.cloud.jobs import begin, refuse_twice
from lmwright.cloud.spec import RUN_FILE, Cloud, Limits, Offer, Spec, job_names, save_spec
from lmwright.cloud.store_check import check_stores
from lmwright.cloud.target import (
    JOB_NAME,
    Settings,
    cloud_of,
    offers_of,
    refuse_local_places,
    settings_with,
)
from lmwright.cloud.work import (
    Work,
    limits_by_size,
    refuse_local_sources,
    refuse_rehearsal,
    refuse_several_hosts,
    refuse_smaller,
)
from lmwright.config.rows import refuse_sources
from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.guard.urls import redact_text
from lmwright.hardware.slices import parse_slice

CODE = "code"
LEADER_PORT = 8476  # on host 0 of a slice
OF_SLICES = ("project", "zone", "network", "subnetwork", "internal_ips", "disks")
OF_SLICES += ("service_account", "valid_hours")
OF_GKE = ("namespace", "image", "pod_account", "queue", "labels")
OF_BOTH = ("bucket", "capacity", "reservation", "secrets")
OF_BOTH += ("max_hours", "max_chip_hours", "max_cost")
OF_SSH = ("remote_python",)
WRITTEN = {"capacity": "spot, --on-demand and --guaranteed"}
WRITTEN |= {"disks": "disk", "labels": "label", "secrets": "secret"}
SETTINGS = frozenset(Settings.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Options of `lmwright launch`."""

    on: str = ""
    name: str | None = None
    detach: bool = False
    dry_run: bool = False
    hang_after: float | None = None
    """Seconds without a step after which the run hangs, if five steps are shorter."""
    failures: int | None = None
    settings: Settings = field(default_factory=Settings)
    """Settings of slices."""
    given: tuple[str, ...] = ()
    """Options of this command that were given, and not those of the settings file."""
    slice: str = ""
    """Slice of a cluster, as in 7x-16."""
    work: Work = Work()
    notebook: str | None = None
    """File to write instead, for Kaggle's or Colab's editor."""


def wanted_with(work: Work, **options: Any) -> Wanted:
    """The options of a launch: fields of `Wanted` and of `Settings`, as many as are given. Raises
    UserError for settings that are none."""
    named = {name: options.pop(name) for name in [*options] if name in SETTINGS}
    wanted = Wanted(**options, work=work, given=tuple(named))
    if wanted.on and not wanted.on.startswith(("local:", "kaggle")):
        wanted = replace(wanted, settings=settings_with(**named))
    return wanted


def launch_command(run: Run | None, source: str, overrides: Sequence[str], wanted: Wanted) -> int:
    """Does the work of a job on a target and supervises it; returns an exit code. Without a run,
    the work is a command."""
    if wanted.notebook is not None or wanted.on == "kaggle":
        refuse_rehearsal(wanted.work, "--notebook" if wanted.notebook else "--on kaggle")
    if wanted.notebook is not None:
        _refuse_beside_notebook(wanted)
        return _write_notebook(_needed(run, wanted), wanted, Path(wanted.notebook))
    if not wanted.on:
        raise UserError("--on: missing; name where to train, as in --on kaggle or --on local:2x4")
    _refuse_idle_options(wanted)
    if wanted.on == "kaggle":
        return _launch_at_kaggle(_needed(run, wanted), wanted)
    if wanted.on.startswith("ssh:"):
        return _launch_by_ssh(run, wanted)
    if not wanted.on.startswith("local:"):
        return _launch_on_slices(run, wanted)
    spec = plan_job(run, source, overrides, wanted)
    if wanted.dry_run:
        for line in describe(spec):
            print(line)
        return 0
    if wanted.work.trains:
        refuse_twice(spec.dir, at_kaggle=False)
        local.refuse_trained(spec.dir)
    save_spec(spec)
    print(f"job {spec.name}: {spec.hosts} hosts; run directory {spec.dir or 'none'}")
    return begin(spec, wanted.detach)


def _needed(run: Run | None, wanted: Wanted) -> Run:
    """The run. Raises UserError without one, for targets that can only train it."""
    if run is None or not wanted.work.trains:
        raise UserError("--on: only training can be launched there; leave out --do and --")
    return run


def _refuse_beside_notebook(wanted: Wanted) -> None:
    """Raises UserError for options that mean nothing where only a notebook is written."""
    idle = {"on": wanted.on and wanted.on != "kaggle", "slice": wanted.slice}
    idle |= {"dry-run": wanted.dry_run, "detach": wanted.detach}
    idle |= {WRITTEN.get(name, name).replace("_", "-"): True for name in wanted.given}
    for option in (option for option, given in idle.items() if given):
        raise UserError(f"--{option}: has no effect beside --notebook, which only writes files; "
                        "leave it out")  # fmt: skip


def _refuse_idle_options(wanted: Wanted) -> None:
    """Raises UserError for options that mean nothing on the target."""
    gke, ssh = wanted.on.startswith(gke_target.PREFIX), wanted.on.startswith("ssh:")
    slices = not (gke or ssh or wanted.on == "kaggle" or wanted.on.startswith("local:"))
    known: tuple[str, ...] = ()
    if gke:
        known = OF_GKE + OF_BOTH
    elif ssh:
        known = OF_SSH
    elif slices:
        known = OF_SLICES + OF_BOTH
    idle = [name for name in wanted.given if name not in known]
    if wanted.slice and not gke:
        idle.append("slice")
    if not idle:
        return
    first = idle[0]
    if gke:
        where = "on gke: the cluster decides that"
    elif first in OF_SSH:
        where = "it is for --on ssh:"
    elif first in OF_GKE or first == "slice":
        where = "it is only for --on gke:CLUSTER"
    else:
        where = "it is for slices"
    option = WRITTEN.get(first, first).replace("_", "-")
    raise UserError(f"--{option}: has no effect here, {where}; leave it out")


def _asked(wanted: Wanted) -> tuple[tuple[Offer, ...], Cloud]:
    """The slices that are asked for, and how they are made."""
    settings = wanted.settings
    if not wanted.on.startswith(gke_target.PREFIX):
        return offers_of(wanted.on, settings), cloud_of(settings)
    cloud = gke_target.cloud_of_gke(wanted.on, settings)
    assert cloud.gke is not None
    return gke_target.offers_of_gke(wanted.slice, settings, cloud.gke.context), cloud


def _launch_on_slices(run: Run | None, wanted: Wanted) -> int:
    """Plans the run for every slice that is asked for, and launches it."""
    (offers, cloud), work = _asked(wanted), wanted.work
    refuse_other_zones(cloud, offers)
    for offer in offers:
        refuse_several_hosts(work, offer.hosts, offer.name)
    if run is not None:
        _check_for_slices(run, wanted, {offer.name for offer in offers})
    elif not wanted.settings.bucket:
        raise UserError("--bucket: missing; name where the job is kept, as gs://BUCKET/lmwright")
    folder = "/".join(run.dir.split("/")[:3]) if run else ""
    root = (wanted.settings.bucket or f"{folder}/lmwright").rstrip("/")
    name = _name(run, wanted).replace("_", "-").replace(".", "-")
    if not JOB_NAME.fullmatch(wanted.name or name):
        raise UserError(
            f"--name: {wanted.name or name!r} cannot name a slice; use small letters, digits and "
            "'-', beginning with a letter, 42 at most"
        )
    if cloud.gke is not None and len(name) > gke_target.LONGEST_NAME:
        raise UserError(
            f"--name: {name} is too long for the names of pods; use at most "
            f"{gke_target.LONGEST_NAME} letters"
        )
    run_dir = run.dir if run else ""
    spec = Spec(
        name=name,
        dir=run_dir,
        command=work.command([RUN_FILE], run_dir),
        hosts=offers[0].hosts,
        port=LEADER_PORT,
        variables={"JAX_COMPILATION_CACHE_DIR": f"{root}/compiled"},  # for the slices after it
        limits=_limits(wanted, run),
        url=f"{root}/jobs/{name}",
        cloud=cloud,
        offers=offers,
    )
    if wanted.dry_run:
        for line in checks.describe(spec, f"{root}/{CODE}", run):
            print(line)
        return 0
    if run is not None and work.trains:
        check_stores(run)
    return remote.launch(spec, run, f"{root}/{CODE}", detach=wanted.detach)


def _check_for_slices(run: Run, wanted: Wanted, names: set[str]) -> None:
    """Raises UserError for a run that the hosts of slices cannot do."""
    from lmwright.planner.command import Wanted as Plan
    from lmwright.planner.command import plan_command

    if wanted.work.verb == "prepare":
        refuse_sources(run)
        refuse_local_sources(run)
        return
    refuse_local_places(run, wanted.settings.disks)
    if wanted.work.rehearses:
        refuse_smaller(run, {name: parse_slice(name).num_devices for name in names})
    for name in sorted(names) if wanted.work.trains else ():
        try:
            over = _apart_from_yaml(wanted, plan_command, run, Plan(on=name, quick=True))
        except UserError as error:
            raise error.at(f"--on {name}") if len(names) > 1 else error from None
        if over:
            raise UserError(f"--on: the run does not fit {name}; the plan above says what would")


def _apart_from_yaml(wanted: Wanted, call: Callable[..., int], *words: Any) -> int:
    """Calls a function; what it prints goes to stderr where stdout is to be a manifest."""
    manifest = wanted.dry_run and wanted.on.startswith(gke_target.PREFIX)
    with contextlib.redirect_stdout(sys.stderr) if manifest else contextlib.nullcontext():
        return call(*words)


def _launch_at_kaggle(run: Run, wanted: Wanted) -> int:
    from lmwright.cloud.kaggle.launch import launch

    name = _name(run, wanted)
    if not wanted.dry_run:
        refuse_twice(_place_of(run), at_kaggle=True)
    spec = launch(run, name, _limits(wanted), dry_run=wanted.dry_run)
    return 0 if spec is None else begin(spec, wanted.detach)


def _launch_by_ssh(run: Run | None, wanted: Wanted) -> int:
    from lmwright.cloud.ssh.launch import launch
    from lmwright.cloud.ssh.line import Access

    access = Access(ssh=wanted.settings.ssh, python=wanted.settings.remote_python)
    name, limits = _name(run, wanted), _limits(wanted, run)
    spec = launch(run, name, wanted.on, access, wanted.work, limits, dry_run=wanted.dry_run)
    return 0 if spec is None else begin(spec, wanted.detach)


def _write_notebook(run: Run, wanted: Wanted, file: Path) -> int:
    from lmwright.cloud.kaggle.launch import plan
    from lmwright.cloud.kaggle.notebook import write_notebook

    check_stores(run, here=True)
    try:
        plan(run)
    except UserError as error:  # the notebook may have another TPU
        print(f"note: on Kaggle's TPU it would not run: {error}")
    beside = write_notebook(run, _name(run, wanted), _limits(wanted), file)
    print(f"wrote {file}; open it in Kaggle or Colab")
    for path in beside:
        print(f"attach {path} to it ({path.stat().st_size / 1e6:,.1f} MB)")
    return 0


def plan_job(run: Run | None, source: str, overrides: Sequence[str], wanted: Wanted) -> Spec:
    """The job of a run on this machine. Raises UserError for a target that is none."""
    hosts, devices = local.parse(wanted.on)
    refuse_several_hosts(wanted.work, hosts, wanted.on)
    source = source if "://" in source else os.path.abspath(source)
    run_dir = "" if run is None else _place_of(run)
    return Spec(
        name=_name(run, wanted),
        dir=run_dir,
        command=wanted.work.command([source, *overrides], run_dir),
        hosts=hosts,
        port=local.free_port(),
        variables=local.variables(devices),
        limits=_limits(wanted, run),
        cwd=os.getcwd(),
    )


def _place_of(run: Run) -> str:
    """The run directory, as a job has it."""
    return run.dir if "://" in run.dir else os.path.abspath(run.dir)


def _limits(wanted: Wanted, run: Run | None = None) -> Limits:
    """The limits that are asked for; those of reading and saving by the size of a run."""
    given = {"step_floor_s": wanted.hang_after, "failures": wanted.failures}
    chosen = {name: value for name, value in given.items() if value is not None}
    limits = wanted.work.limits(replace(Limits(), **chosen))
    return limits if run is None else limits_by_size(limits, run)


def _name(run: Run | None, wanted: Wanted) -> str:
    return wanted.name or _free_name(run.name if run else "command")


def _free_name(name: str) -> str:
    base = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.lower()).strip("-._")[:40]
    base, taken, number = base or "job", set(job_names()), 1
    while f"{base}-{number}" in taken:
        number += 1
    return f"{base}-{number}"


def describe(spec: Spec) -> list[str]:
    """Everything that launching would do."""
    variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in sorted(spec.variables.items()))
    command = redact_text(shlex.join(spec.command))
    return [
        f"would make {spec.folder} with job.json",
        f"would start {spec.hosts} agents, the leader at {spec.address}:{spec.port}",
        f"each would run: {variables} {command}",
        f"in run directory {spec.dir or 'none'}",
    ]
