"""Check: whether a run can be trained on the hosts, before anything of it is made there."""

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress

from lmwright import __version__
from lmwright.cloud.ssh.line import Line, all_of
from lmwright.cloud.target import weights_of
from lmwright.cloud.work import Work
from lmwright.config.run import Run
from lmwright.errors import UserError
from lmwright.storage.bucket import is_bucket


def check_hosts(lines: Sequence[Line], name: str) -> None:
    """Reaches all hosts. Raises UserError for one that fails, has another lmwright, is named twice
    or has such a job already."""
    told = all_of(lines, "hello", name=name)
    machines: dict[tuple[str, ...], str] = {}
    for line, facts in zip(lines, told, strict=True):
        host = line.host.name
        if facts["version"] != __version__:
            raise UserError(
                f"{host}: has lmwright {facts['version']}, and here is {__version__}; install "
                "the same version on all"
            )
        if (facts["code"], facts["python"]) != (told[0]["code"], told[0]["python"]):
            raise UserError(
                f"{host}: its lmwright or Python {facts['python']} differs from that of "
                f"{lines[0].host.name} (Python {told[0]['python']}); all hosts need the same"
            )
        machine = tuple(facts["machine"])
        if machine in machines:
            raise UserError(f"{host}: is the same machine as {machines[machine]}; name it once")
        machines[machine] = host
        if facts["taken"]:
            raise UserError(
                f"--name: {host} has a job {name!r} already; choose another name, or run this "
                f"where it was launched: lmwright jobs forget {name}"
            )


def check_places(run: Run, work: Work) -> None:
    """Raises UserError for folders that mean something on this machine only."""
    places = [("dir", run.dir), ("data.dir", run.data.dir)]
    if work.verb == "prepare":
        places += [(f"data.sources.{n}.path", s.path) for n, s in enumerate(run.data.sources)]
    for field, path in places:
        if "://" not in path and not os.path.isabs(path):
            raise UserError(
                f"{field}: {path}: a relative path means nothing on other machines; write an "
                "absolute one that all hosts can read, or gs://BUCKET/FOLDER"
            )
    for field, source in weights_of(run):
        if "://" not in source and not os.path.isabs(source) and os.path.exists(source):
            raise UserError(
                f"{field}: {source}: a relative path means nothing on other machines; write an "
                "absolute one that all hosts can read, or the model's hub name"
            )


def check_folders(lines: Sequence[Line], run: Run, work: Work) -> None:
    """Raises UserError where the hosts do not see the run's folders as one."""
    if not is_bucket(run.dir):
        _share(lines, run.dir)
    if work.trains and not is_bucket(run.data.dir):
        for line, facts in zip(
            lines, digests := all_of(lines, "store", folder=run.data.dir), strict=True
        ):
            if not facts["digest"]:
                raise UserError(
                    f"data.dir: {line.host.name} has no prepared data in {run.data.dir}; run "
                    "`lmwright prepare` there or copy it, or write gs://BUCKET/FOLDER"
                )
            if facts != digests[0]:
                raise UserError(
                    f"data.dir: {run.data.dir} on {line.host.name} differs from that on "
                    f"{lines[0].host.name}; copy one over the other, or write gs://BUCKET/FOLDER"
                )
    for field, source in weights_of(run):
        if not work.trains or not os.path.isabs(source):
            continue
        for line, facts in zip(lines, all_of(lines, "exists", path=source), strict=True):
            if not facts["there"]:
                raise UserError(
                    f"{field}: {source} is not on {line.host.name}; copy it there, or "
                    "write the model's hub name"
                )


def _share(lines: Sequence[Line], folder: str) -> None:
    """Proves that a folder is the same on all hosts: what the first writes, the others see."""
    token = secrets.token_hex(8)
    first, *others = lines
    try:
        made = first.ask("mark", folder=folder, token=token)["made"]
    except UserError as error:
        raise UserError(
            f"dir: {error}: the run directory cannot be written there; write a path that can, or "
            "gs://BUCKET/FOLDER"
        ) from None
    try:
        seen = all_of(others, "marked", folder=folder, token=token) if others else []
    finally:
        with suppress(UserError):
            first.ask("unmark", folder=folder, token=token, made=made)
    for line, facts in zip(others, seen, strict=True):
        if not facts["seen"]:
            raise UserError(
                f"dir: {folder} on {line.host.name} is not the folder that {first.host.name} "
                "has; write a path that all hosts share, or gs://BUCKET/FOLDER"
            )


def leader_place(lines: Sequence[Line]) -> tuple[str, int]:
    """Address and free port of the first host, where all others reach it. Raises UserError."""
    first, *others = lines
    given = first.host.address if others else "127.0.0.1"
    token = secrets.token_hex(8)
    try:
        ear = first.ask("listen", address=given, token=token)
    except UserError as error:
        if not given:
            raise
        raise UserError(
            f"{error}: address={given} is not an address of {first.host.name} itself; write one of "
            "those that `hostname -I` prints there"
        ) from None
    addresses, port = ear["addresses"], ear["port"]
    try:
        called = {"addresses": addresses, "port": port, "token": token}
        heard = all_of(others, "call", **called) if others else []
    finally:
        with suppress(UserError):
            first.ask("deaf")
    reached = [a for a in addresses if all(a in facts["addresses"] for facts in heard)]
    if reached:
        return reached[0], port
    deaf = next((n for n, facts in enumerate(heard) if not facts["addresses"]), 0)
    raise UserError(
        f"{others[deaf].host.name}: cannot connect to {first.host.name} at "
        f"{' or '.join(addresses) or 'any address'}; let the hosts connect to each other on all "
        f"ports, or name an address by which they can, in the hosts' file: {first.host.name} "
        "address=..."
    )
