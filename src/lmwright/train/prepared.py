"""Data that is prepared on the way to training."""

from collections.abc import Callable

from lmwright.config.run import Run
from lmwright.data import missing
from lmwright.presets.sources import say_licenses
from lmwright.train.hosts import alone
from lmwright.train.trackers import refuse_missing


def prepare_first(run: Run, load: Callable[[], Run], *, pod: bool) -> Run:
    """Prepares the run's data if none is there and it takes only minutes, and prints the licenses
    of its sources. Not where several processes train. Raises UserError as `prepare_missing` does,
    and first for a tracker that is not installed.

    Returns the run. Of `train.epochs` it is loaded again, as the schedule is fitted to their steps,
    which the data tells.
    """
    if not alone(pod=pod):
        return run
    refuse_missing(run)
    if not missing.prepare_missing(run):
        return run
    say_licenses(run.data.sources)
    return run if run.train.epochs is None else load()
