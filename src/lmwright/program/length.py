"""Length: how many steps the epochs of a run are, by the rows of its prepared data."""

from dataclasses import replace

from lmwright.config.check import check_run
from lmwright.config.fit import count_steps
from lmwright.config.run import Run
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError


def with_steps(run: Run) -> Run:
    """Run with `train.steps` in place of `train.epochs`; the last step may reach into the next
    epoch."""
    if run.train.epochs is None:
        return run
    try:
        rows = TokenStore.open(run.data.dir).epoch_rows
    except UserError as error:
        raise type(error)(
            f"train.epochs: the steps of an epoch are counted in the prepared data, and {error}"
            "; or set train.steps"
        ) from None
    steps = count_steps(run.train.epochs, rows, run.train.global_batch_size)
    run = replace(run, train=replace(run.train, steps=steps, epochs=None))
    check_run(run)
    return run


def epoch_rows(folder: str) -> int | None:
    """Rows of an epoch of the data prepared in a folder; None where there is none."""
    try:
        return TokenStore.open(folder).epoch_rows
    except UserError:
        return None
