"""Logs that grow, in the bucket of the tests."""

import pytest

from lmwright.cloud import pieces
from lmwright.cloud.pieces import LogReader, LogSender
from lmwright.storage.bucket import Bucket

SECRETS = (b"hunter2", b"-----KEY\nabc\n-----END")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1000)


@pytest.fixture
def bucket(url):
    return Bucket(url)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "host-0.log"


def add(log, text):
    with open(log, "ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


def test_a_long_log_is_sent_and_read_once(bucket, log, monkeypatch):
    moved = {"write": 0, "read": 0}
    write, read = Bucket.write, Bucket.read

    def counted(self, name, data):
        moved["write"] += len(data)
        return write(self, name, data)

    def counted_read(self, name):
        there = read(self, name)
        moved["read"] += len(there[0])
        return there

    sender, reader, seen = LogSender(bucket, log, 0), LogReader(bucket, 0), []
    monkeypatch.setattr(Bucket, "write", counted)
    monkeypatch.setattr(Bucket, "read", counted_read)
    lines = [f"step {n}: loss {1 / (n + 1):.4f}" for n in range(400)]
    for start in range(0, 400, 10):
        add(log, "\n".join(lines[start : start + 10]) + "\nhalf a li")
        sender.send()
        seen += reader.lines()
        log.write_bytes(log.read_bytes()[: -len("half a li")])
    assert seen == lines
    size = log.stat().st_size
    assert size > 8000
    assert moved["write"] < 4 * size and moved["read"] < 4 * size  # and not 20 times
    add(log, "the end")
    sender.send(closing=True)
    assert reader.lines(over=True) == ["the end"]


def test_a_reader_that_comes_late_sees_all(bucket, log):
    assert LogReader(bucket, 0).lines() == []
    text = "".join(f"line {n}\n" for n in range(1000))
    add(log, text)
    LogSender(bucket, log, 0).send()
    assert LogReader(bucket, 0).lines() == text.splitlines()
    assert LogReader(bucket, 1).lines() == []


def test_an_agent_that_is_started_again_and_a_new_slice_go_on(bucket, log, tmp_path):
    add(log, "a" * 1500 + "\nb\n")
    LogSender(bucket, log, 0).send()
    add(log, "c\n")
    LogSender(bucket, log, 0).send()  # the same host
    other = tmp_path / "elsewhere" / "host-0.log"
    other.parent.mkdir()
    add(other, "d\n")
    LogSender(bucket, other, 0).send()
    assert LogReader(bucket, 0).lines() == ["a" * 1500, "b", "c", "d"]


@pytest.mark.parametrize("shift", [*range(0, 40, 3), 985, 990, 995, 999, 1000])
def test_secrets_are_hidden_wherever_a_piece_ends(bucket, log, shift):
    sender = LogSender(bucket, log, 0, SECRETS)
    text = b"x" * shift + b"\n" + b"\n".join(SECRETS * 40) + b"\nend\n"
    for start in range(0, len(text), 333):
        add(log, text[start : start + 333])
        sender.send()
    sender.send(closing=True)
    sent = b"".join(bucket.read(name)[0] for name in sorted(bucket.entries()))
    assert sent == text.replace(SECRETS[0], b"***").replace(SECRETS[1], b"***")
    assert len(bucket.entries()) > 1
