"""Processes that would train different runs together end with one sentence each."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lmwright.errors import UserError
from lmwright.train import agreement
from tests.train.bare_run import make_run


@pytest.fixture
def second(monkeypatch):
    """Lets this be process 1 of two, of which the first has told `facts`."""

    def arrange(tell):
        told = []
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: 2)
            patch.setattr(agreement, "_compare", told.append)
            tell()
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(agreement, "_of_first", lambda _: agreement.json.dumps(told[0]))
        monkeypatch.setattr(agreement, "of_all", lambda mine: np.array([False, mine]))

    return arrange


def test_the_fields_that_differ_are_named(second):
    run = make_run()
    second(lambda: agreement.refuse_other_runs(run))
    agreement.refuse_other_runs(run)
    agreement.refuse_other_runs(replace(run, dir="/elsewhere/run"))
    with pytest.raises(UserError, match=r"run of process 1: seed is 9 here and .* on process 0"):
        agreement.refuse_other_runs(replace(run, seed=9))


def test_other_versions_are_refused(second, monkeypatch):
    second(lambda: agreement.refuse_other_runs(make_run()))
    monkeypatch.setattr(agreement.lmwright, "__version__", "0.0.1")
    with pytest.raises(UserError, match="the version of lmwright is"):
        agreement.refuse_other_runs(make_run())


def test_other_data_are_refused(second):
    stores = [{"model": SimpleNamespace(fingerprint=name)} for name in "ab"]
    second(lambda: agreement.refuse_other_stores(stores[0]))
    agreement.refuse_other_stores(stores[0])
    with pytest.raises(UserError, match=r"the data is \"?b\"? here and \"?a\"? on process 0"):
        agreement.refuse_other_stores(stores[1])
