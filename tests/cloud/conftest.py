"""The storage server of tests/storage, for jobs whose state is in a bucket; and slices that are
supervised while the test plays their hosts."""

import pytest

from tests.storage.conftest import proxy, server, small_run, url  # noqa: F401


@pytest.fixture
def tpu(monkeypatch, tmp_path):
    """The TPU service, without hosts."""
    from lmwright.cloud import roles, tpu_api
    from tests.cloud.fake_tpu import FakeTpu

    service = FakeTpu()
    for name in (tpu_api.ENDPOINT, roles.ENDPOINT):
        monkeypatch.setenv(name, f"http://{service.server.address}/")
    monkeypatch.setenv(tpu_api.NO_CREDENTIALS, "true")
    for name in ("STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    yield service
    service.close()


@pytest.fixture
def spec(url, tpu):  # noqa: F811
    """A job on a slice, in the bucket."""
    from lmwright.cloud.book import begin
    from lmwright.cloud.spec import Cloud, Spec
    from tests.cloud.played import offer

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


@pytest.fixture
def run(small_run, url, tmp_path):  # noqa: F811
    """A run in the bucket, with its data there."""
    from lmwright.cli.main import main
    from tests.cloud.played import run_in_bucket

    assert main(["data", "push", small_run.data.dir, f"{url}/data"]) == 0
    return run_in_bucket(small_run, url, f"{url}/data", tmp_path)


@pytest.fixture
def host_python(tmp_path, monkeypatch):
    """A Python for the hosts that is this one, and no packages to install beside it."""
    import io
    import sys
    import tarfile

    from lmwright.cloud import stage

    script = f'#!/bin/sh\nexec {sys.executable} "$@"\n'.encode()
    path = tmp_path / "python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("python/bin/python3")
        entry.size, entry.mode = len(script), 0o755
        archive.addfile(entry, io.BytesIO(script))
    monkeypatch.setenv(stage.PYTHON_VARIABLE, str(path))
    (tmp_path / "hosts.lock").write_text("")
    monkeypatch.setattr(stage, "LOCK", tmp_path / "hosts.lock")
    monkeypatch.setattr(stage, "download_wheels", lambda folder: None)
