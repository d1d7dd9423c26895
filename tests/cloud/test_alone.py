"""A slice that nobody supervises keeps to its budget and deletes itself; hosts go on telling that
they are about to go, and never train on the CPU in place of chips."""

import asyncio
import base64
import json
from dataclasses import replace

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from lmwright.cloud import alone, host, metadata, tpu_api, vault
from lmwright.cloud.book import id_of, label_of, read_book
from lmwright.cloud.identity import HostIdentity
from lmwright.cloud.spec import Limits, dump_spec, read_state
from lmwright.cloud.tpu_api import Tpus
from lmwright.errors import StorageError, UserError
from lmwright.storage.bucket import Bucket
from lmwright.train.chips import refuse_missing_chips
from tests.cloud.fake_tpu import Server, once
from tests.cloud.played import offer

ZONE = "us-central2-b"
SOON = Limits(alone_s=0.05)


@pytest.fixture
def place(spec, tpu, monkeypatch):
    """The first host of the job's slice, which is there."""
    spec = replace(spec, limits=SOON)
    id = id_of(spec, 1)
    book = {"made": [{"id": id, "offer": 0, "asked": 0.0}], "current": 0}
    Bucket(spec.url).write("slices.json", json.dumps(book))
    Bucket(spec.url).write("job.json", dump_spec(spec))
    Tpus(spec.cloud).create(id, label_of(spec), offer(), {})
    values = {
        "instance/zone": f"projects/12/zones/{ZONE}", "project/project-id": "p",
        "instance/attributes/lmwright-job": spec.url, "instance/attributes/lmwright-slice": id,
        "instance/attributes/tpu-env": "WORKER_ID: '0'",
    }  # fmt: skip
    tpu.values = values

    def answer(_method, path, *_):
        key = path.removeprefix("/computeMetadata/v1/")
        return (200, values[key]) if key in values else (404, "")

    server = Server(answer)
    monkeypatch.setenv("GCE_METADATA_HOST", server.address)
    monkeypatch.setattr(host, "Limits", lambda: SOON)
    yield HostIdentity(url=spec.url, incarnation=id, slice_index=0, worker=0, address="127.0.0.1")
    server.shutdown()


def test_a_host_that_could_not_read_its_run_reads_it_at_the_next_start(spec, monkeypatch):
    """Its job would fail for good without the run file, and begin to count anew without its
    state."""
    bucket, read = Bucket(spec.url), Bucket.read
    bucket.write("run.toml", "steps")
    bucket.write("state.json", json.dumps(read_state(spec) | {"attempt": 7}))

    def away(bucket, name):
        if name == "run.toml":
            raise StorageError(f"{name}: cannot be read")
        return read(bucket, name)

    with monkeypatch.context() as at:
        at.setattr(Bucket, "read", away)
        with pytest.raises(StorageError):
            host._keep(spec, bucket)
    host._keep(spec, bucket)
    assert (spec.folder / "run.toml").read_text() == "steps" and read_state(spec)["attempt"] == 7


def test_a_slice_is_deleted_by_what_its_host_knows(place, tpu):
    for name in Bucket(place.url).entries():
        Bucket(place.url).remove(name)  # the job was forgotten
    tpu.faults = once("400", "DELETE", times=2)
    asyncio.run(alone.leave(place, SOON, "the job is over"))
    assert tpu.resources == {}


@pytest.mark.parametrize("missing", ["instance/zone", "project/project-id", "credentials"])
def test_a_slice_is_deleted_once_its_host_is_told_who_it_is(place, tpu, monkeypatch, missing):
    value = tpu.values.pop(missing, "")
    if not value:
        monkeypatch.delenv(tpu_api.NO_CREDENTIALS)
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        monkeypatch.setenv("HOME", "/nowhere")

    async def scene():
        leaving = asyncio.create_task(alone.leave(place, SOON, "it is over", at_once=True))
        await asyncio.sleep(0.3)
        assert tpu.resources and not leaving.done()
        if value:
            tpu.values[missing] = value
        else:
            monkeypatch.setenv(tpu_api.NO_CREDENTIALS, "true")
        await asyncio.wait_for(leaving, 20)

    asyncio.run(scene())
    assert tpu.resources == {}


def test_a_host_without_a_job_deletes_its_slice(place, tpu, capsys):
    Bucket(place.url).remove("job.json")
    asyncio.run(host.main())
    assert tpu.resources == {} and "is no longer a job" in capsys.readouterr().out


def test_a_host_without_its_secret_deletes_its_slice(place, spec, tpu, monkeypatch):
    cloud = replace(spec.cloud, secrets=("HF_TOKEN=mine",))
    spec = replace(spec, limits=SOON, cloud=cloud)
    Bucket(spec.url).write("job.json", dump_spec(spec))
    monkeypatch.setenv(vault.ENDPOINT, f"http://{tpu.server.address}/")
    asyncio.run(host.main())
    assert tpu.resources == {}
    assert json.loads(Bucket(spec.url).read("state.json")[0])["status"] == "failed"


def test_a_host_that_may_not_delete_says_so(place, tpu, capsys):
    Bucket(place.url).remove("job.json")
    tpu.allowed = False
    asyncio.run(host.main())
    assert "roles/tpu.admin" in capsys.readouterr().out


def test_a_slice_whose_job_begins_again_stays(place, tpu):
    Bucket(place.url).write("state.json", json.dumps({"status": "starting"}))
    with pytest.raises(SystemExit, match="the job goes on"):
        asyncio.run(alone.leave(place, SOON, "the job is over"))
    assert len(tpu.resources) == 1


@pytest.mark.parametrize("why", ["forgotten", "done", "does not report"])
def test_a_host_notices_that_nothing_is_left_to_do(place, spec, why):
    bucket = Bucket(spec.url)
    bucket.write("state.json", json.dumps({"status": "done" if why == "done" else "running"}))
    if why == "forgotten":
        bucket.remove("job.json")
    with pytest.raises(alone.Ended, match=why) as ended:
        asyncio.run(asyncio.wait_for(alone.watch(replace(spec, limits=SOON), place, 1), 20))
    assert ended.value.at_once == (why == "does not report")


def test_a_leader_that_speaks_is_no_reason_to_go(place, spec):
    async def scene():
        watching = asyncio.create_task(alone.watch(replace(spec, limits=SOON), place, 1))
        for number in range(20):
            state = {"status": "running", "time": number}
            await asyncio.to_thread(Bucket(spec.url).write, "state.json", json.dumps(state))
            await asyncio.sleep(0.03)
        assert not watching.done()
        watching.cancel()

    asyncio.run(scene())


def test_a_bucket_that_does_not_answer_is_no_reason_to_go(place, spec, monkeypatch):
    def refuse(*_):
        raise UserError("gs://b: cannot be read")

    monkeypatch.setattr(alone, "state_of", refuse)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(alone.watch(replace(spec, limits=SOON), place, 1), 1))


def test_the_budget_holds_without_a_supervisor(place, spec):
    cloud = replace(spec.cloud, max_cost=1e-9)
    spec, bucket = replace(spec, cloud=cloud), Bucket(spec.url)
    alone._keep_to_budget(spec, place, bucket, began=0.0)
    assert b"the limit of 1e-09 USD is reached" in bucket.read("stop")[0]
    assert "active" not in read_book(bucket)["made"][0]  # the book is the supervisor's


def test_a_notice_is_told_for_as_long_as_it_holds(place, tpu, monkeypatch):
    monkeypatch.setattr(host, "NOTICE_POLL_S", 0.02)
    told = []

    class Agent:
        notice = staticmethod(told.append)
        told_to_end = False

    async def scene():
        watching = asyncio.create_task(host._watch_notices(Agent))
        await asyncio.sleep(0.2)
        assert set(told) <= {""}
        tpu.values["instance/preempted"] = "TRUE"
        await asyncio.sleep(1)
        tpu.values["instance/preempted"] = "FALSE"
        await asyncio.sleep(1)
        watching.cancel()

    asyncio.run(scene())
    assert told.count("preempted: TRUE") > 1
    assert told[-1] == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("preempted", "TRUE"),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
        ("maintenance-event", "NONE"),
    ],
)
def test_each_key_of_the_metadata_server_is_a_notice(place, tpu, key, value):
    tpu.values[f"instance/{key}"] = value
    assert metadata.notice() == (f"{key}: {value}" if value != "NONE" else "")


def test_ranks_of_a_slice_do_not_fall_back_to_the_cpu(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    variables = host._on_tpus(offer())
    assert variables == {"JAX_PLATFORMS": "tpu,cpu", "LMWRIGHT_ON": "v4-16"}
    with pytest.raises(UserError, match="chips are missing: JAX has 0 of the 8 devices of v4-16"):
        refuse_missing_chips(variables)
    refuse_missing_chips({})
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert host._on_tpus(offer()) == {}


def test_fewer_devices_than_were_asked_for_are_a_bad_slice(monkeypatch):
    from lmwright.cloud.watch import BAD_SLICE

    class Device:
        platform = "tpu"

    monkeypatch.setattr("jax.devices", lambda: [Device()] * 15)
    with pytest.raises(UserError, match="JAX has 15 of the 32 devices of 2xv4-32") as error:
        refuse_missing_chips({"LMWRIGHT_ON": "2xv4-32"})
    assert any(word in f"{error.value}" for word in BAD_SLICE)
    refuse_missing_chips({"LMWRIGHT_ON": "v5e-8"})


@pytest.mark.parametrize("fault", [503, 429, 0])
def test_secrets_are_waited_for_while_their_service_is_away(place, monkeypatch, fault):
    """The job would fail for good, as where a secret is not there."""
    answers = [(fault, {"error": {}})] * 2
    secret = 200, {"payload": {"data": base64.b64encode(b"s").decode()}}
    service = Server(lambda *_: answers.pop() if answers else secret)
    monkeypatch.setenv(vault.ENDPOINT, f"http://{service.address}/")
    monkeypatch.setattr(vault, "PAUSE_S", 0.01)
    assert vault.read_secrets("p", ("HF_TOKEN=mine",)) == {"HF_TOKEN": "s"}
    answers += [(fault, {"error": {}})] * 20
    monkeypatch.setattr(vault, "PATIENCE_S", 0.05)
    with pytest.raises(UserError, match="--secret: mine of project p"):
        vault.read_secrets("p", ("HF_TOKEN=mine",))
    service.shutdown()
