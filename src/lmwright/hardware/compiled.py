"""Compiled programs that JAX keeps in a folder: what is left of one makes room for a whole one.

JAX writes a program in place and never over another. Of one that a full disk or a kill cut off, it
would warn in every command from then on, and compile it again.
"""

import os
import re
import warnings
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

FOLDER = "JAX_COMPILATION_CACHE_DIR"
"""Variable with the folder."""
TOLD = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '([^']+)'")

_shown_by: list[Any] = []


def listen() -> None:
    """Removes programs of which JAX warns from now on: those that it cannot read before it writes
    them anew, and what is left of those that it cannot write."""
    if warnings.showwarning is not _show:
        _shown_by[:] = [warnings.showwarning]
        warnings.showwarning = _show


def _show(message: Warning | str, *where: Any, **options: Any) -> None:
    folder = os.environ.get(FOLDER)
    if folder and (told := TOLD.match(str(message))):
        for path in Path(folder).glob(f"{escape(told[1])}-*"):
            with suppress(OSError):
                path.unlink()
    _shown_by[0](message, *where, **options)
