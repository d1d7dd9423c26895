"""Objects through Google's client, against a real server that fails as the service does."""

import pytest
from google.auth.exceptions import DefaultCredentialsError, TransportError

from lmwright.errors import EXIT_TRANSIENT, StorageError, UserError
from lmwright.storage import bucket as bucket_module
from lmwright.storage.bucket import Bucket, Changed
from tests.storage.fake_gcs import BUCKET, Faults


def test_objects_are_written_over_the_generation_that_was_read(url):
    bucket = Bucket(url)
    first = bucket.write("a/b.txt", "one", generation=0)
    with pytest.raises(Changed):
        bucket.write("a/b.txt", "two", generation=0)
    second = bucket.write("a/b.txt", "two", generation=first.generation)
    assert bucket.read("a/b.txt")[0] == b"two"
    with pytest.raises(Changed):
        bucket.remove("a/b.txt", first.generation)
    bucket.remove("a/b.txt", second.generation)
    assert bucket.read("a/b.txt") is None
    bucket.remove("a/b.txt")  # which is no error


def test_names_are_relative_and_folders_are_left_apart(url):
    bucket = Bucket(url)
    for name in ("run.toml", "checkpoints/1/x", "tensorboard/events", "checkpoints.damaged/0/x"):
        bucket.write(name, name)
    apart = ("checkpoints", "checkpoints.damaged")
    assert set(bucket.entries(apart=apart)) == {"run.toml", "tensorboard/events"}
    assert set(bucket.entries("checkpoints")) == {"checkpoints/1/x"}
    assert len(bucket.entries()) == 4


@pytest.mark.parametrize("size", [0, pytest.param(3_000_000, marks=pytest.mark.slow)])
def test_every_request_may_fail_and_nothing_is_lost(proxy, url, size, tmp_path, monkeypatch):
    """A fifth of all requests is turned away, stalls, is cut or dropped."""
    monkeypatch.setattr(bucket_module, "REQUEST_S", 0.5)  # stalls are longer
    proxy.faults = Faults(0.2, seed=size)
    bucket, files = Bucket(url), {}
    for number in range(8):
        data = bytes([number]) * size
        files[f"f{number}"] = data
        there = bucket.write(f"f{number}", data, generation=0)
        assert there.size == size
    for name, data in files.items():
        assert bucket.read(name)[0] == data
        bucket.download(name, tmp_path / name)
        assert (tmp_path / name).read_bytes() == data
    assert set(bucket.entries()) == set(files)
    assert sum(proxy.faults.counts.values()) > 2


def test_a_bucket_that_is_not_there(proxy):
    with pytest.raises(UserError, match="no such bucket"):
        Bucket("gs://none-such/run").write("x", "y")


@pytest.mark.parametrize("kind", ["429", "503", "reset", "stall"])
@pytest.mark.parametrize("doing", ["write", "read"])
def test_a_service_that_stays_away_is_told_and_comes_back(proxy, url, monkeypatch, kind, doing):
    monkeypatch.setattr(bucket_module, "PATIENCE_S", 2.0)
    monkeypatch.setattr(bucket_module, "REQUEST_S", 0.5)
    monkeypatch.setenv("LMWRIGHT_HEARTBEAT", "file")
    proxy.faults = Faults(1.0, kinds=(kind,))
    with pytest.raises(StorageError, match="try again") as told:
        Bucket(url).write("x", "y") if doing == "write" else Bucket(url).read("x")
    assert told.value.exit_code == EXIT_TRANSIENT  # a supervisor starts again


@pytest.mark.parametrize("code", ["401", "403", "404"])
def test_a_refusal_is_final(proxy, url, monkeypatch, code):
    monkeypatch.setenv("LMWRIGHT_HEARTBEAT", "file")
    monkeypatch.setattr("tests.storage.fake_gcs.STATUSES", (code,))
    proxy.faults = Faults(1.0, kinds=(code,))
    with pytest.raises(UserError) as told:
        Bucket(url).write("x", "y")
    assert told.value.exit_code == 2


def test_a_token_server_that_does_not_answer_is_waited_for(monkeypatch):
    monkeypatch.setenv("LMWRIGHT_HEARTBEAT", "file")
    bucket = Bucket(f"gs://{BUCKET}")
    with pytest.raises(StorageError), bucket._told("read"):
        raise TransportError("the metadata server did not answer")
    with pytest.raises(UserError) as told, bucket._told("read"):
        raise DefaultCredentialsError("none here")
    assert told.value.exit_code == 2


def test_a_url_without_a_bucket():
    with pytest.raises(UserError, match="names no bucket"):
        Bucket("gs://")


def test_moved_objects_keep_their_content(url):
    bucket = Bucket(url)
    bucket.write("a/x", "content")
    bucket.move("a/x", "b/x")
    assert set(bucket.entries()) == {"b/x"} and bucket.read("b/x")[0] == b"content"
    assert Bucket(f"gs://{BUCKET}").read("none") is None
