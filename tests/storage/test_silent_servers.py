"""Servers that take a connection and say nothing, or stop in the middle of an answer: each question
to them ends."""

import socket
import threading
import time

import pytest

from lmwright.config.run import Source
from lmwright.data.sources.file import File, Slice
from lmwright.data.sources.files import find_files
from lmwright.data.sources.read import read_rows
from lmwright.errors import StorageError, UserError
from lmwright.publish import account
from lmwright.storage import hub, patience
from lmwright.storage.patience import url_filesystem

SILENT_S = 0.2
HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Silent:
    """A server that sends `answers`, one a connection, and then holds connections without a
    word."""

    def __init__(self, *answers):
        self.answers, self.held = list(answers), []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self):
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._socket.close()
        for connection in self.held:
            connection.close()

    def _serve(self):
        try:
            while True:
                connection, _ = self._socket.accept()
                self.held.append(connection)
                connection.recv(1 << 16)
                connection.sendall(self.answers.pop(0) if self.answers else b"")
        except OSError:
            return


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    for name in ("SILENT_S", "SILENT_BUCKET_S"):
        monkeypatch.setattr(patience, name, SILENT_S)
    for name in ("ANSWER_S", "WRITTEN_S"):
        monkeypatch.setattr(hub, name, SILENT_S)
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 60  # the clients' own waits are of minutes, or endless


def test_an_address_that_does_not_answer():
    pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")
    with Silent() as server, pytest.raises(UserError, match="cannot be"):
        list(find_files(Source(path=f"http://{server.address}/a.jsonl")))


def test_a_file_that_stops_in_its_middle_is_not_called_damaged():
    pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")
    lines = b'{"text": "a"}\n' * 1000
    answers = [HEADER % len(lines), HEADER % len(lines) + lines[: len(lines) // 2]]
    with Silent(*answers) as server:
        file = File(f"http://{server.address}/a.jsonl", "a.jsonl", "jsonl", None, None, "")
        with pytest.raises(StorageError, match=r"does not answer any more \(no answer in time\)"):
            list(read_rows(Slice(file), Source(path=file.path)))


def test_a_bucket_is_asked_again(monkeypatch):
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    with Silent(b"", HEADER % 3 + b"abc") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{server.address}")
        fs, path = url_filesystem("gs://b/x")
        assert fs.cat_file(path) == b"abc"
    assert len(server.held) == 2


def test_what_the_user_set_for_fsspec_counts(monkeypatch):
    aiohttp = pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")
    import fsspec

    own = aiohttp.ClientTimeout(total=5)
    monkeypatch.setitem(fsspec.config.conf, "https", {"client_kwargs": {"timeout": own}})
    assert url_filesystem("https://h/x")[0].client_kwargs == {"timeout": own}
    monkeypatch.setitem(fsspec.config.conf, "https", {"client_kwargs": {"headers": {"a": "b"}}})
    kept = url_filesystem("simplecache::https://h/x")[0].fs.client_kwargs
    assert kept["headers"] == {"a": "b"} and kept["timeout"].sock_read == SILENT_S


def test_a_hub_that_does_not_answer(monkeypatch):
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with Silent() as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{server.address}")
        with pytest.raises(UserError, match=r"hf://a/b: cannot be fetched \(timed out\)"):
            hub.fetch_files("hf://a/b", "a/b", None, lambda held: [], known_by=["config.json"])
        with pytest.raises(UserError, match=r"a/b: the hub cannot be reached \(timed out\)"):
            account.open_repo("a/b", public=False)


def test_a_client_of_the_program_keeps_its_waits():
    hugging = pytest.importorskip("huggingface_hub")
    from huggingface_hub.utils import _http

    hub.bound_waits.cache_clear()
    before = _http._GLOBAL_CLIENT_FACTORY
    try:
        own = lambda: None  # noqa: E731
        hugging.set_client_factory(own)
        hub.bound_waits()
        assert _http._GLOBAL_CLIENT_FACTORY is own
    finally:
        hugging.set_client_factory(before)
