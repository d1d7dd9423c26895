"""The file of a report: where it goes, written whole, to a bucket too."""

from collections.abc import Sequence
from pathlib import Path

from lmwright.errors import UserError
from lmwright.guard.files import write_whole
from lmwright.storage.mirror import mirror_folder, place_in, send_file


def usual_file(dirs: Sequence[str | Path], name: str) -> str | Path:
    """The file `name` in the run directory, or in the current folder for several runs."""
    return place_in(dirs[0], name) if len(dirs) == 1 else name


def write_page(text: str, out: str | Path) -> Path:
    """Writes a page; returns its path on this machine. Raises UserError where it cannot."""
    local = mirror_folder(out)
    try:
        write_whole(local, text.encode(errors="replace"))
        send_file(local, out)
    except OSError as error:
        raise UserError(
            f"{out}: cannot be written: {error.strerror}; choose another file with -o"
        ) from error
    return local
