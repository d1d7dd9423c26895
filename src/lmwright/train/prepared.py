"""Data that is prepared on the way to training."""

from lmwright.config.run import Run
from lmwright.data import missing
from lmwright.presets.sources import say_licenses
from lmwright.train.hosts import alone


def prepare_first(run: Run, *, pod: bool) -> None:
    """Prepares the run's data if none is there and it takes only minutes, and prints the licenses
    of its sources. Not where several processes train. Raises UserError as `prepare_missing` does.
    """
    if alone(pod=pod) and missing.prepare_missing(run):
        say_licenses(run.data.sources)
