"""The mirror of a folder in a bucket, which several commands of a machine use at once."""

import fcntl
import os
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lmwright.errors import UserError
from lmwright.storage import mirror
from lmwright.storage.bucket import Bucket
from lmwright.storage.mirror import LOCK, fetched
from lmwright.train import rundir


@contextmanager
def locked(folder, how):
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, how)
    try:
        yield
    finally:
        os.close(lock)


@pytest.fixture
def folder(url):
    Bucket(url).write("run.toml", "first")
    return fetched(url)


def test_a_second_reader_waits_for_no_first_and_misses_nothing(url, folder):
    Bucket(url).write("run.toml", "second")
    with locked(folder, fcntl.LOCK_SH):  # of a reader that is still fetching
        assert (fetched(url) / "run.toml").read_text() == "second"


def test_a_file_that_another_reader_has_removed_is_gone(url, folder, monkeypatch):
    (folder / "old").touch()  # which the bucket does not have
    listed = mirror._local_names

    def removed_meanwhile(here):
        names = listed(here)
        (here / "old").unlink()
        return names

    monkeypatch.setattr(mirror, "_local_names", removed_meanwhile)
    assert not (fetched(url) / "old").exists()


def test_a_training_waits_for_readers_but_not_for_another(url, small_run, folder, monkeypatch):
    run = replace(small_run, dir=url)
    monkeypatch.setattr(rundir, "READERS_S", 0.3)
    with locked(folder, fcntl.LOCK_EX):
        own = os.open(folder / LOCK, os.O_RDWR)
        with pytest.raises(UserError, match="is being trained by another process"):
            rundir._lock(own, run)
    with locked(folder, fcntl.LOCK_SH):
        monkeypatch.setattr(rundir, "READERS_S", 10.0)
        reader = os.open(folder / LOCK, os.O_RDWR)
        fcntl.flock(reader, fcntl.LOCK_SH)
        threading.Timer(0.2, os.close, (reader,)).start()
    rundir._lock(own, run)
    os.close(own)
