"""Whose run a directory is: what another run may do with it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lmwright.errors import UserError
from lmwright.train.rundir import refuse_other_run


def test_a_run_that_has_begun_does_not_start_from_other_weights(trained_run, tmp_path):
    """It would go on from its checkpoint, and its model card name the other weights."""
    folder = Path(shutil.copytree(trained_run.dir, tmp_path / "run"))
    other = replace(trained_run, train=replace(trained_run.train, init_from="base"))
    with pytest.raises(UserError, match=r"^train.init_from: .* began without it"):
        refuse_other_run(other, folder)
    shutil.rmtree(folder / "checkpoints")  # of a run that was killed before its first one
    refuse_other_run(other, folder)


def test_only_a_run_that_saved_nothing_may_be_removed(trained_run, tmp_path):
    folder = Path(shutil.copytree(trained_run.dir, tmp_path / "run"))
    metrics = folder / "metrics.jsonl"
    other = replace(trained_run, seed=trained_run.seed + 1)

    def may_be_removed() -> bool:
        with pytest.raises(UserError, match="or choose another dir= for this one") as told:
            refuse_other_run(other, folder)
        return str(told.value).endswith("has saved nothing yet")

    assert not may_be_removed()
    shutil.rmtree(folder / "checkpoints")
    assert not may_be_removed()  # metrics tell of them
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"checkpoint"' not in line))
    assert may_be_removed()
    metrics.unlink()
    refuse_other_run(other, folder)  # nothing was trained there
