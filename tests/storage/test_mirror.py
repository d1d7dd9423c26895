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
from lmwright.storage.mirror import LOCK, Mirror, fetched, mirror_folder
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


def test_a_run_below_is_left_alone(url, small_run, monkeypatch):
    """Reading the folder above it neither takes its files back to what the bucket has, nor removes
    those that were not pushed yet, nor copies its checkpoints."""
    one = f"{url}/one"
    for name in ("run.toml", "metrics.jsonl", "checkpoints/3/state"):
        Bucket(one).write(name, "old")
    Bucket(url).write("note.txt", "of the folder itself")
    folder = mirror_folder(one)
    Mirror(one, folder).begin()
    for name in ("run.toml", "metrics.jsonl", "report.html"):
        (folder / name).write_text("new")
    before = (folder / "metrics.jsonl").stat().st_ino
    above = fetched(url)
    assert (above / "note.txt").read_text() == "of the folder itself"
    assert (folder / "metrics.jsonl").stat().st_ino == before
    assert (folder / "report.html").read_text() == "new"
    assert not (folder / "checkpoints").exists()
    (above / "more.txt").write_text("x")
    Mirror(url, above).push()
    assert Bucket(url).entry("more.txt") and not Bucket(one).entry("report.html")


def test_a_folder_of_folders_is_not_copied(url, proxy):
    """Such as a bucket whose name was given without the run's."""
    Bucket(url).write("texts/a.txt", "large")
    assert not list(fetched(url).rglob("*.txt"))


def test_a_folder_becomes_what_the_bucket_has(url, folder):
    """What was removed here comes again, what was removed there goes, and the tokenizer of a run is
    its own though it is a stage."""
    for name in ("report.html", "tokenizer/stage.json", "tokenizer/tokenizer.json"):
        Bucket(url).write(name, name)
    fetched(url)
    (folder / "run.toml").unlink()
    Bucket(url).remove("report.html")
    assert (fetched(url) / "run.toml").read_text() == "first"
    assert not (folder / "report.html").exists()
    assert (folder / "tokenizer" / "tokenizer.json").read_text() == "tokenizer/tokenizer.json"


def test_only_what_changed_is_sent(url, folder):
    def generations():
        return {name: entry.generation for name, entry in Bucket(url).entries().items()}

    one = Mirror(url)
    (folder / "metrics.jsonl").write_text("1")
    one.push()
    before = generations()
    (folder / "metrics.jsonl").write_text("12")
    one.push()
    changed = {name for name, number in generations().items() if number != before[name]}
    assert changed == {"metrics.jsonl"} and "run.toml" in before
