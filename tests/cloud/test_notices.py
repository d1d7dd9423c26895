"""What the metadata server announces, and what a job makes of it."""

import itertools
import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from lmwright.cloud import metadata
from lmwright.cloud.local import free_port, variables
from lmwright.cloud.spec import Spec, read_state, save_spec
from lmwright.config.load import dump_toml
from tests.cloud.fake_tpu import Server
from tests.cloud.test_local import until
from tests.resume.conftest import run_of_two_layers as small_run  # noqa: F401
from tests.resume.small_runs import in_dir, losses

NONE_YET = 503, '{"error": "no notifications have been received yet, try again later"}'
EVENT, PREEMPTED, UPCOMING = "maintenance-event", "preempted", "upcoming-maintenance?alt=json"
# An agent of a slice, but for what it is told by the bucket.
HOST = """
import asyncio, sys
from lmwright.cloud import host
from lmwright.cloud.agent import Agent, lead
from lmwright.cloud.spec import load_spec

async def main(spec):
    agent = Agent(spec, 0)
    watch = asyncio.create_task(host._watch_notices(agent))
    await lead(spec, agent)

asyncio.run(main(load_spec(sys.argv[1])))
"""


class Metadata:
    """A metadata server whose keys can be flipped."""

    def __init__(self):
        self.calm()
        self.asked = []
        self.server = Server(self.answer)

    def calm(self):
        self.values = {EVENT: (200, "NONE"), PREEMPTED: (200, "FALSE"), UPCOMING: NONE_YET}

    def answer(self, _method, path, _body, headers):
        assert headers["Metadata-Flavor"] == "Google"
        key = path.removeprefix("/computeMetadata/v1/instance/")
        self.asked.append((time.monotonic(), key))
        return self.values.get(key, (404, ""))


@pytest.fixture
def service(monkeypatch):
    service = Metadata()
    monkeypatch.setenv("GCE_METADATA_HOST", service.server.address)
    yield service
    service.server.shutdown()


def window(begins_in_s, status="PENDING"):
    begins = datetime.now().astimezone() + timedelta(seconds=begins_in_s)
    stamp = begins.strftime("%Y-%m-%dT%H:%M:%S.000%z")  # as the service writes it
    facts = {"windowStartTime": stamp, "maintenanceStatus": status, "canReschedule": False}
    return 200, json.dumps(facts | {"maintenanceType": "SCHEDULED"})


FLIPS = [
    (PREEMPTED, (200, "TRUE"), "preempted: TRUE"),
    (EVENT, (200, "TERMINATE_ON_HOST_MAINTENANCE"), "maintenance-event: TERMINATE_ON_HOST"),
    (UPCOMING, partial(window, 60), "upcoming-maintenance: "),
    (UPCOMING, partial(window, -7200, "ONGOING"), "upcoming-maintenance: "),
]


@pytest.mark.parametrize(("key", "value", "told"), FLIPS)
def test_each_key_is_a_notice_for_as_long_as_it_says_so(service, key, value, told):
    assert metadata.notice() == ""
    service.values[key] = value() if callable(value) else value  # a suite can take an hour
    assert metadata.notice().startswith(told)
    service.calm()
    assert metadata.notice() == ""


@pytest.mark.parametrize(
    "value", [window(6 * 86400), window(-7200), (200, "{}"), (200, "soon"), (200, '"x"'), (404, "")]
)
def test_a_maintenance_of_another_day_is_none(service, value):
    service.values[UPCOMING] = value
    assert metadata.notice() == ""


def test_a_server_that_does_not_answer_says_nothing(service):
    service.values = dict.fromkeys(service.values, (500, ""))
    began = time.monotonic()
    assert metadata.notice() is None
    assert time.monotonic() - began < 30  # it is asked again soon, or a notice would be missed


@pytest.mark.slow
def test_a_flip_lets_the_run_save_and_go_on_once_it_is_taken_back(
    service,
    small_run,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = in_dir(small_run, tmp_path / "run")
    (tmp_path / "run.toml").write_text(dump_toml(run))
    words = ["train.steps=100000", "checkpoint.save_every_steps=90000", "eval.every_steps=90000"]
    spec = Spec(
        name="j", dir=run.dir, command=("lmwright", "train", str(tmp_path / "run.toml"), *words),
        hosts=1, port=free_port(), variables=variables(1),
    )  # fmt: skip
    save_spec(spec)
    paths = os.pathsep.join(path for path in sys.path if path)
    with open(tmp_path / "agent.log", "w") as log:
        agent = subprocess.Popen(
            [sys.executable, "-c", HOST, "j"], stdout=log, stderr=log,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip

    def beat():
        paths = list((spec.folder / "beats").glob("host-0.?"))
        return json.loads(paths[0].read_text() or "{}") if paths else {}

    def steps():
        return beat().get("phase") == "step" and beat()["step"]

    def saved():
        return read_state(spec)["status"] == "waiting" and read_state(spec)["saved"]

    try:
        for number, (key, value, told) in enumerate(FLIPS[:3], 1):
            until(steps, 120)
            service.values[key] = value() if callable(value) else value
            began = time.monotonic()
            step = until(saved, 60)
            seconds = time.monotonic() - began
            assert (Path(run.dir) / "checkpoints" / str(step) / "hashes.json").exists()
            assert read_state(spec)["failures"] == 0 and read_state(spec)["attempt"] == number
            assert told in (spec.folder / "events.log").read_text()
            assert seconds < 15, f"{key}: saved after {seconds:.1f} s"
            time.sleep(1.5)
            assert read_state(spec)["attempt"] == number  # it does not train on a doomed host
            service.calm()
    finally:
        agent.kill()
        agent.wait()
    log = (spec.folder / "logs" / "host-0.log").read_text()
    assert log.count("stopped after step") == 3 and "continuing from step" in log
    assert sorted(losses(run)) == list(range(1, len(losses(run)) + 1))
    times = [at for at, key in service.asked if key == EVENT]
    assert max(b - a for a, b in itertools.pairwise(times)) < 30


@pytest.mark.parametrize("answer", [b"garbage\r\n", b"HTTP/1.1 200 OK\r\n\r\n\xff", b""])
def test_an_answer_that_is_none_ends_nothing(monkeypatch, answer):
    class Broken(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", "{}:{}".format(*server.server_address))
        assert metadata.notice() is None
        server.shutdown()
