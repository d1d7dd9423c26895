"""Launching on machines that are there already and that the user's ssh reaches.

Nothing is left on a host before all of them are checked, and nothing anywhere if one then refuses
the job.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace

from lmwright.cloud.spec import RUN_FILE, Limits, Spec, remove_job, save_spec
from lmwright.cloud.ssh.check import check_folders, check_hosts, check_places, leader_place
from lmwright.cloud.ssh.far import FACTS
from lmwright.cloud.ssh.hosts import Host, read_hosts
from lmwright.cloud.ssh.job import Fleet, adopt, facts_of
from lmwright.cloud.ssh.line import Access, Line, every
from lmwright.cloud.store_check import check_stores
from lmwright.cloud.work import Work, refuse_several_hosts
from lmwright.config.load import dump_toml
from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.guard.urls import redact_text


def launch(
    run: Run | None,
    name: str,
    target: str,
    access: Access,
    work: Work,
    limits: Limits,
    *,
    dry_run: bool = False,
) -> Spec | None:
    """Checks the hosts and puts the job there; None after a dry run. Raises UserError for all
    that would fail there and can be known before."""
    hosts = read_hosts(target)
    access.words()
    refuse_several_hosts(work, len(hosts), target)
    run_dir = run.dir if run else ""
    if run is not None:
        check_places(run, work)
    spec = Spec(
        name=name,
        dir=run_dir,
        command=work.command([RUN_FILE], run_dir),
        hosts=len(hosts),
        port=0,
        limits=limits,
    )
    if dry_run:
        print("\n".join(describe(spec, hosts, access, run)))
        return None
    lines = [Line(host, access) for host in hosts]
    try:
        check_hosts(lines, name)
        if run is not None:
            check_folders(lines, run, work)
            if work.trains:
                check_stores(run)
        address, port = leader_place(lines)
        spec = replace(spec, address=address, port=port)
        _place(spec, lines, run, access)
    except BaseException:
        for line in lines:
            line.close()
        raise
    print(f"job {name}: {len(hosts)} hosts, the leader at {address}:{port} on {hosts[0].name}; "
          f"run directory {run_dir or 'none'}")  # fmt: skip
    return spec


def _place(spec: Spec, lines: Sequence[Line], run: Run | None, access: Access) -> None:
    """Makes the job's folder here and on all hosts, or nowhere."""
    files = {FACTS: facts_of([line.host for line in lines], access)}
    if run is not None:
        files[RUN_FILE] = dump_toml(run)
    save_spec(spec, files)  # without its facts it would be taken for a job of this machine
    fleet = Fleet(spec, lines)
    try:
        for answer in every(lines, fleet.place):
            if isinstance(answer, UserError):
                raise answer
    except BaseException:
        fleet.remove(end=False)
        remove_job(spec)
        raise
    adopt(fleet)


def describe(spec: Spec, hosts: Sequence[Host], access: Access, run: Run | None) -> list[str]:
    """Every command and file of a launch."""
    folder = f"~/.local/state/lmwright/jobs/{spec.name}"
    lines = [f"would make {spec.folder} with job.json, {FACTS}" + (f", {RUN_FILE}" if run else "")]
    for number, host in enumerate(hosts):
        lines += [
            f"host {number}: would run {shlex.join(access.command(host))}",
            f"host {number}: would make {folder} with job.json, {FACTS}"
            + (f", {RUN_FILE}, by its standard input" if run else ", by its standard input"),
            f"host {number}: would start {access.python} -m lmwright.cloud.agent {spec.name} "
            f"{number}" + ("" if number else ", and the leader in it"),
        ]
    if run is not None and "://" not in run.dir:
        lines.append(f"would prove that all hosts see {run.dir}, by a file that is removed again")
    where = hosts[0].address or "an address by which the others reach it"
    lines.append(f"the leader would listen at {where}, on a free port of {hosts[0].name}")
    lines.append(f"each rank would run: {redact_text(shlex.join(spec.command))}")
    lines.append(f"in run directory {spec.dir or 'none'}")
    return lines
