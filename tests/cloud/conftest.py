"""The storage server of tests/storage, for jobs whose state is in a bucket; and slices that are
supervised while the test plays their hosts."""

import pytest

from tests.storage.conftest import proxy, server, small_run, url  # noqa: F401


@pytest.fixture
def tpu(monkeypatch):
    """The TPU service, without hosts."""
    from lmwright.cloud.tpu_api import ENDPOINT, NO_CREDENTIALS
    from tests.cloud.fake_tpu import FakeTpu

    service = FakeTpu()
    monkeypatch.setenv(ENDPOINT, f"http://{service.server.address}/")
    monkeypatch.setenv(NO_CREDENTIALS, "true")
    yield service
    service.close()


@pytest.fixture
def spec(url, tpu, tmp_path, monkeypatch):  # noqa: F811
    """A job on a slice, in the bucket."""
    from lmwright.cloud.book import begin
    from lmwright.cloud.spec import Cloud, Spec
    from tests.cloud.played import offer

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    spec = Spec(
        name="j", dir=f"{url}/run", command=("train",), hosts=2, port=0, url=f"{url}/jobs/j",
        cloud=Cloud(project="p", capacity="spot"), offers=(offer(),),
    )  # fmt: skip
    begin(spec, f"{url}/code/abc", "")
    return spec


@pytest.fixture
def played(spec):
    """The supervisor of that job."""
    from tests.cloud.played import Played

    player = Played(spec)
    yield player
    player.slices.close()
