"""One storage server for a test process, and a folder of its bucket for each test."""

import re
import uuid

import pytest

from tests.resume.conftest import run_of_two_layers as small_run  # noqa: F401
from tests.storage.fake_gcs import BUCKET, Faults, served

running = []


@pytest.fixture(scope="session")
def server():
    if running:  # it is a fixture of tests/cloud, too, and the client knows one server
        yield running[0]
        return
    with served() as proxy:
        running.append(proxy)
        yield proxy


@pytest.fixture
def proxy(server):
    """The server's proxy, without faults."""
    server.faults = Faults()
    yield server
    server.faults = Faults()


@pytest.fixture
def url(proxy, request, tmp_path, monkeypatch):
    """A folder in the bucket that is this test's, and mirrors of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return f"gs://{BUCKET}/{name}-{uuid.uuid4().hex[:6]}"
