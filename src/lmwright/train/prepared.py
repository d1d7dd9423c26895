"""Data that is prepared on the way to training."""

from lmwright.config.run import Run
from lmwright.data import missing
from lmwright.presets.sources import say_licenses
from lmwright.train.hosts import alone
from lmwright.train.trackers import refuse_missing


def prepare_first(run: Run, *, pod: bool) -> None:
    """Prepares the run's data if none is there and it takes only minutes, and prints the licenses
    of its sources. Not where several processes train. Raises UserError as `prepare_missing` does,
    and first for a tracker that is not installed.
    """
    if not alone(pod=pod):
        return
    refuse_missing(run)
    if missing.prepare_missing(run):
        say_licenses(run.data.sources)
