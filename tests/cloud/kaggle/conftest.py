"""A run for Kaggle, and the stand-in as the client of this process finds it."""

from dataclasses import replace

import pytest

from lmwright.cloud import jobs
from lmwright.cloud.kaggle import job, launch, parcel
from tests.cloud.kaggle.service import TOKEN, FakeKaggle, play_to_the_end
from tests.saved_run import tiny_run

NINE_HOURS = 9 * 3600.0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tiny_run(tmp_path_factory.mktemp("kaggle"))
    return replace(run, train=replace(run.train, global_batch_size=8))


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """The stand-in, which the client of this process asks with the token; nothing that was sent
    holds the token."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KAGGLE_API_ENVIRONMENT", "LOCALHOST")  # it logs in at its first import
    monkeypatch.delenv("KAGGLE_API_TOKEN", raising=False)
    pytest.importorskip("kaggle", reason="Kaggle's client is not installed")
    from kaggle.api.kaggle_api_extended import KaggleApi
    from kagglesdk import kaggle_env

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KAGGLE_API_TOKEN", TOKEN)
    monkeypatch.setattr(KaggleApi, "args", ["--local"])
    monkeypatch.setattr(job, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(jobs, "POLL_S", 0.02)
    monkeypatch.setattr(launch, "plan", lambda run: (run, NINE_HOURS))  # tried apart
    monkeypatch.setattr(parcel, "download_wheels", lambda folder: (folder / "a.whl").touch())
    monkeypatch.setattr(parcel, "fetch_python", lambda path: path.touch())
    with FakeKaggle(TOKEN, play_to_the_end) as fake:
        local = kaggle_env.KaggleEnv.LOCAL
        monkeypatch.setitem(kaggle_env._env_to_endpoint, local, fake.url)
        assert kaggle_env.get_endpoint(local).startswith("http://127.0.0.1:")
        yield fake
        assert not any(TOKEN.encode() in body for body in fake.bodies)


@pytest.fixture
def small_wheel(monkeypatch):
    """No session of these tests installs anything."""

    def build(folder):
        (folder / "lmwright-1.whl").write_bytes(b"wheel")
        return folder / "lmwright-1.whl"

    monkeypatch.setattr(parcel, "build_wheel", build)
