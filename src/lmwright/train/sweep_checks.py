"""Comparison of a sweep's runs with their prepared data before the first one starts: the checks of
`train` that need no device. Lengths of rows are also compared where nothing is prepared yet."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lmwright.config.run import Run, seq_len_of
from lmwright.data.manifest import MANIFEST
from lmwright.data.missing import has_adapter_data
from lmwright.data.portions import PORTIONS
from lmwright.data.stale import has_begun, refuse_stale
from lmwright.data.stored import read_small
from lmwright.errors import UserError
from lmwright.program.length import completed
from lmwright.program.stores import open_fitting
from lmwright.program.trainee import training_of


def refuse_data(runs: Sequence[tuple[str, Run]]) -> None:
    """Raises UserError for the first of the runs, each with its place in the sweep, that cannot
    train on the data of its folder."""
    lengths: dict[str, int] = {}
    compared: list[tuple[Any, ...]] = []
    for where, run in runs:
        try:
            _refuse_settings(run, compared)
            for folder, rows in _folders(run):
                if _is_prepared(folder):
                    open_fitting(run, folder, seq_len_of(run)).check_batch(rows)
                length = lengths.setdefault(folder, seq_len_of(run))
                if length != seq_len_of(run):
                    raise UserError(
                        f"data.dir: {folder} is for rows of {length} tokens in an earlier run of "
                        f"the sweep, and of {seq_len_of(run)} here; give them equal rows, or one "
                        "of them another data.dir"
                    )
        except UserError as error:
            raise error.at(where) from error


def _refuse_settings(run: Run, compared: list[tuple[Any, ...]]) -> None:
    """Compares settings of data with prepared ones, once where several runs have the same."""
    if not _is_prepared(run.data.dir):
        return
    settings = (run.data, run.objective.windows)
    told = settings in compared or has_begun(run.dir)
    if run.data.sources and not has_adapter_data(run) and not told:
        compared.append(settings)
        refuse_stale(run)
    completed(run)


def _folders(run: Run) -> list[tuple[str, int]]:
    """The folder of prepared data and the rows of a step of each trainee."""
    return [(trainee.data, trainee.rows) for trainee in training_of(run).trainees]


def _is_prepared(folder: str) -> bool:
    with suppress(Exception):  # of any kind by the client of a bucket that is not reached
        return any(read_small(folder, name) for name in (f"pack/{MANIFEST}", PORTIONS))
    return False
