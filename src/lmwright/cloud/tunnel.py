"""Tunnel: a port of this machine that leads to one of a host, through ssh.

localhost:8888 --ssh -L--> host: localhost:8888     for a notebook that runs there
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from lmwright.errors import UserError

MOST = 65535


@dataclass(frozen=True)
class Tunnel:
    """The two ports."""

    here: int
    there: int

    def words(self) -> list[str]:
        """Options of ssh. A port that is taken here is an error, and only this machine may use
        it."""
        forward = f"localhost:{self.here}:localhost:{self.there}"
        return ["-o", "ExitOnForwardFailure=yes", "-L", forward]

    def text(self, host: int) -> str:
        """Line that tells where it leads."""
        return f"localhost:{self.here} leads to port {self.there} of host {host}; Ctrl-C closes it"


def parse_tunnel(text: str) -> Tunnel:
    """A tunnel from `PORT` or `PORT:PORT_THERE`. Raises UserError."""
    found = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text, re.ASCII)
    here = int(found[1]) if found else 0
    there = int(found[2] or here) if found else 0
    if not 1 <= here <= MOST or not 1 <= there <= MOST:
        raise UserError(
            f"--tunnel: {text!r} is not a port; write 8888, or 9000:8888 for port 8888 there"
        )
    return Tunnel(here, there)


def run_until_interrupted(command: Sequence[str], tunnel: Tunnel | None, host: int) -> int:
    """Exit code of a program on this terminal; 0 for a tunnel that Ctrl-C has closed."""
    if tunnel is not None:
        print(tunnel.text(host), flush=True)
    try:
        return subprocess.run(command).returncode
    except KeyboardInterrupt:
        if tunnel is None:
            raise
        return 0
