"""Hosts: the file that `--on ssh:FILE` names.

# one host a line, as it is written after `ssh`; the leader runs on the first
gpu1 address=10.0.0.3
trainer@gpu2
"""

import re
from dataclasses import dataclass
from pathlib import Path

from lmwright.errors import UserError

PREFIX = "ssh:"
HOST = re.compile(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.:%-]*", re.ASCII)  # no option of ssh
ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
MOST_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine behind ssh."""

    name: str
    """Name as written after `ssh`."""
    address: str = ""
    """Address under which the other hosts reach it; empty where it is found by trying."""


def read_hosts(target: str) -> list[Host]:
    """The hosts that `ssh:FILE` names, in their order. Raises UserError with file and line."""
    path = target.removeprefix(PREFIX)
    if not path:
        raise UserError("--on: ssh: names no file; write ssh:hosts.txt, with one host a line")
    try:
        with open(Path(path).expanduser(), "rb") as file:
            text = file.read(MOST_BYTES).decode()
    except OSError as error:
        raise UserError(
            f"--on: {path}: {error.strerror}; write a file with one host a line"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"--on: {path}: is not text; write a file with one host a line") from None
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"{path}:{number}")
        for taken in {host.name, host.address} - {""}:
            if taken in lines:
                raise UserError(
                    f"{path}:{number}: {taken} is in line {lines[taken]} already; "
                    "name each host once"
                )
        lines |= dict.fromkeys({host.name, host.address} - {""}, number)
        hosts.append(host)
    if not hosts:
        raise UserError(f"{path}: names no host; write one a line, as you write it after `ssh`")
    return hosts


def _host(words: list[str], where: str) -> Host:
    name, *rest = words
    if not HOST.fullmatch(name):
        raise UserError(
            f"{where}: {name!r} is not a host; write NAME, USER@NAME or an alias of ~/.ssh/config"
        )
    if not rest:
        return Host(name=name)
    field, _, address = rest[0].partition("=")
    if len(rest) > 1 or field != "address" or not ADDRESS.fullmatch(address):
        raise UserError(
            f"{where}: {' '.join(rest)!r} is not understood; after the host may come "
            "address=NAME or address=10.0.0.3, by which the others reach it"
        )
    return Host(name=name, address=address)
