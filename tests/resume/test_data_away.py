"""A run whose rows lie on a server that goes away."""

import functools
import http.server
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from lmwright.checkpoint.saved import SavedStates
from lmwright.config.run import Eval
from lmwright.data.rows import loader
from lmwright.errors import StorageError, UserError
from lmwright.storage import patience
from lmwright.storage.patience import Patience, may_pass
from lmwright.train.hooks import Hook
from lmwright.train.session import train
from lmwright.train.signals import EXIT_PREEMPTED
from tests.data.test_store import RangeHandler
from tests.resume.small_runs import in_dir, losses

pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")
LAST = 10**9


class Server(RangeHandler):
    """Does not answer requests of these numbers."""

    away: tuple[int, int] = (LAST, LAST)
    asked = 0

    def do_GET(self):
        Server.asked += 1
        if Server.away[0] <= Server.asked < Server.away[1]:
            return self.send_error(503)
        super().do_GET()


@pytest.fixture(scope="module")
def served(small_run):
    """A run that reads its rows, and no copies of them, from a server."""
    handler = functools.partial(Server, directory=small_run.data.dir)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield replace(small_run, data=replace(small_run.data, dir=url, cache_gib=0.0))
        server.shutdown()


@pytest.fixture(scope="module")
def count(served, tmp_path_factory):
    """How often a run asks, of which a server misses nothing."""
    return asked_when_trained(in_dir(served, tmp_path_factory.mktemp("before") / "run"))


@pytest.fixture
def remote(served, count, tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "WAITS_S", (0.01, 0.01, 0.01))
    return in_dir(served, tmp_path / "run")


def asked_when_trained(run, away=(LAST, LAST)):
    Server.asked, Server.away = 0, away
    assert train(run, jax.devices()[:1]).exit_code == 0
    return Server.asked


def test_a_run_waits_for_a_server_that_comes_back(remote, count, trained_run, capfd):
    asked_when_trained(remote, away=(count // 2, count // 2 + 3))
    assert losses(remote) == losses(trained_run)
    assert "503, message='Service Unavailable'" in capfd.readouterr().err


def test_a_server_that_stays_away_is_told(remote, count):
    """No step is lost."""
    remote = replace(remote, eval=Eval())
    with pytest.raises(StorageError, match=r"http://.*: cannot be read: 503.*the network"):
        asked_when_trained(remote, away=(count // 3, LAST))
    assert [max(losses(remote))] == SavedStates(Path(remote.dir)).steps()[-1:]


def test_a_run_that_is_asked_to_stop_does_not_wait_for_its_rows(remote, monkeypatch, capfd):
    """It saves what it has; before, both Ctrl-C and SIGTERM waited with it."""
    monkeypatch.setattr(patience, "WAITS_S", (0.01, 600))
    monkeypatch.setattr(loader, "GRACE_S", 0.1)

    class Stop(Hook):
        def after_step(self, session, step):
            if step == 1:
                Server.away = (0, LAST)
            if step == 2:
                threading.Timer(1, signal.raise_signal, (signal.SIGTERM,)).start()

    Server.asked, Server.away = 0, (LAST, LAST)
    remote = replace(remote, train=replace(remote.train, steps=100), eval=Eval())
    began, before = time.monotonic(), set(threading.enumerate())
    outcome = train(remote, jax.devices()[:1], hooks=[Stop()])
    assert outcome.exit_code == EXIT_PREEMPTED and time.monotonic() - began < 120
    assert [outcome.step] == SavedStates(Path(remote.dir)).steps()[-1:]
    assert "did not come" in capfd.readouterr().out
    assert not [left for left in set(threading.enumerate()) - before if not left.daemon]


def test_a_server_that_never_answered_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(patience.time, "sleep", lambda s: pytest.fail("waited"))

    def refuse(error):
        raise error

    with pytest.raises(StorageError, match=r"^s3://b/x: cannot be read: down; check its name"):
        Patience("s3://b/x").ask(lambda: refuse(ConnectionError("down")))
    with pytest.raises(UserError, match="your rights") as told:
        Patience("s3://b/x").ask(lambda: refuse(PermissionError("Forbidden")))
    assert not isinstance(told.value, StorageError)
    with pytest.raises(FileNotFoundError):
        Patience("s3://b/x").ask(lambda: refuse(FileNotFoundError("x")))


def test_what_may_pass():
    response = lambda code: type("Refused", (OSError,), {"status": code})("no")  # noqa: E731
    assert may_pass(TimeoutError()) and may_pass(response(503)) and may_pass(response(429))
    assert not may_pass(response(401)) and not may_pass(PermissionError())
