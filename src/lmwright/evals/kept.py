"""Measurements that commands keep in the run directory that the model came from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lmwright.formats.open import open_run
from lmwright.report.measured import Line, keep_measured


@contextmanager
def kept_in_run(
    path: str, step: int | None, lines: Sequence[Line], adapter: str | None
) -> Iterator[None]:
    """Keeps lines once they are printed, also where nobody reads them; places other than runs,
    which have no `step`, have no report."""
    try:
        yield
    finally:
        if step is not None:
            keep_measured(open_run(path).path, step, lines, adapter)
