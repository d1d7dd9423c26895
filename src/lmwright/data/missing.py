"""Missing data: prepared on the way to training, where that is a matter of minutes."""

from pathlib import Path

from lmwright.config.run import Run
from lmwright.data.manifest import MANIFEST
from lmwright.data.portions import PORTIONS
from lmwright.data.prepare import prepare_command
from lmwright.data.room import text_bytes
from lmwright.data.stale import refuse_stale
from lmwright.errors import UserError
from lmwright.hardware.devices import cores_here

BYTES_PER_MINUTE = 60e6
"""Bytes of text that one process prepares per minute at the least: benchmarks/prepare.py measures
several times it."""
FETCHED_PER_MINUTE = 60e6
"""Bytes that are fetched per minute at the least, on a line of 8 Mbit/s."""
MOST_MINUTES = 5


def has_adapter_data(run: Run) -> bool:
    """True for a run whose adapters train on data of their own."""
    return run.lora is not None and any(adapter.data for adapter in run.lora.adapters)


def prepare_missing(run: Run) -> bool:
    """Prepares the run's data if none is there and its sources, or the samples of them, are read
    and fetched within `MOST_MINUTES`.

    Raises UserError for more text than that, or for sources elsewhere that do not tell their size,
    so that nobody waits for it unasked; and for data that was prepared with other settings. True if
    it prepared something.
    """
    data = run.data
    if not data.sources or has_adapter_data(run):
        return False
    if "://" in data.dir:
        refuse_stale(run)
        return False
    if (Path(data.dir) / f"pack/{MANIFEST}").exists():
        refuse_stale(run)
        return False  # whatever else is wrong there, opening it says
    if (Path(data.dir) / PORTIONS).exists():
        return False
    elsewhere = any("://" in source.path for source in data.sources)
    try:
        size = text_bytes(run)
    except UserError:
        size = None
    if size is None and elsewhere:
        raise UserError(
            f"data.dir: nothing is prepared in {data.dir}, and its sources are fetched from "
            f"elsewhere; run `lmwright prepare` first"
        )
    if size is None:
        return False  # sources that were moved, too: that the data is not there comes first
    minutes = size / BYTES_PER_MINUTE / (data.workers or cores_here())
    if elsewhere:
        minutes = max(minutes, size / FETCHED_PER_MINUTE)
    if minutes > MOST_MINUTES:
        raise UserError(
            f"data.dir: nothing is prepared in {data.dir}, which takes up to {minutes:.0f} "
            f"minutes; run `lmwright prepare` first"
        )
    prepare_command(run)
    return True
