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
    from dataclasses import replace

    from lmwright.cli.main import main
    from lmwright.config.load import dump_toml
    from lmwright.config.run import Checkpoint

    assert main(["data", "push", small_run.data.dir, f"{url}/data"]) == 0
    run = replace(
        small_run,
        dir=f"{url}/run",
        data=replace(small_run.data, dir=f"{url}/data"),
        train=replace(small_run.train, global_batch_size=16, num_microbatches=1),
        checkpoint=Checkpoint(save_every_steps=3),
    )
    (tmp_path / "run.toml").write_text(dump_toml(run))
    return run
