"""The file of a report: where it goes, written whole, to a bucket too."""

import os
from collections.abc import Sequence
from pathlib import Path

from lmwright.errors import UserError
from lmwright.guard.files import NO_SPACE
from lmwright.guard.temporary import write_output
from lmwright.storage.mirror import mirror_folder, place_in, send_file

PAGES = (".html", ".md")
STDOUT = "-"
"""The name that stands for the output of the command, as in other tools."""


def usual_file(dirs: Sequence[str | Path], name: str) -> str | Path:
    """The file `name` in the run directory, or in the current folder for several runs."""
    return place_in(dirs[0], name) if len(dirs) == 1 else name


def write_page(text: str, out: str | Path) -> Path:
    """Writes a page; returns its path on this machine. Raises UserError where it cannot."""
    page = text.encode(errors="replace")
    if out == STDOUT:
        print(page.decode(), end="")
        return Path("/dev/stdout")
    local = mirror_folder(out)
    place = Path(os.path.realpath(local))  # a link, such as /dev/stdout, stays
    if place.is_file() and place.suffix not in PAGES:
        raise UserError(
            f"{out}: exists and is not a page ({', '.join(PAGES)}); choose another name"
        )
    try:
        if place.exists() and not place.is_file():  # a pipe or a device; a folder is refused
            place.write_bytes(page)
        else:
            write_output(place, page)
        send_file(local, out)
    except OSError as error:
        room = "free some space, or " if error.errno in NO_SPACE else ""
        raise UserError(
            f"{out}: cannot be written ({error.strerror}); {room}choose another file: lmwright "
            "report RUN... -o FILE"
        ) from error
    return local
