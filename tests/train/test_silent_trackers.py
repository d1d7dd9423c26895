"""A server of wandb that says nothing holds neither the start nor the end of a run."""

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lmwright.train.metrics import MetricsWriter
from lmwright.train.trackers import WANDB_ENDS
from tests.storage.test_silent_servers import Silent
from tests.train.bare_run import make_run, read

SERVED = {
    "RunResumeStatus": {"model": None},
    "UpsertBucket": {
        "upsertBucket": {
            "bucket": {
                "id": "QQ==", "name": "x", "displayName": "x", "config": "{}",
                "historyLineCount": 0,
                "project": {"id": "UA==", "name": "p", "entity": {"id": "RQ==", "name": "e"}},
            },
            "inserted": True,
        }
    },
}  # fmt: skip


class Wandb(BaseHTTPRequestHandler):
    """Answers what begins a run, and later nothing more."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(self.path)
        found = re.search(rb"(query|mutation) (\w+)", body)
        kind, name = found[0].decode().split() if found else ("", "")
        if kind != "query" and name not in SERVED:
            threading.Event().wait()
        answer = {"data": SERVED.get(name, {})}
        self.send_response(200)
        text = json.dumps(answer).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST

    def log_message(self, *_):
        pass


SCRIPT = """
    import sys
    from pathlib import Path
    from lmwright.train import trackers
    from lmwright.train.metrics import MetricsWriter
    from tests.train.bare_run import make_run
    trackers.WANDB_ENDS |= [word.split("=") for word in sys.argv[2:]]
    with MetricsWriter(Path(sys.argv[1]), make_run(("wandb",)), None) as metrics:
        metrics.log(1, loss=1.0)
"""


def logged_by_a_process(folder, address, *waits):
    """What a process prints that logs a step to wandb, whose `waits` are shorter."""
    pytest.importorskip("wandb")
    variables = os.environ | {"WANDB_BASE_URL": f"http://{address}", "WANDB_API_KEY": "a" * 40}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), *waits],
        env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert [line["step"] for line in read(folder / "metrics.jsonl")] == [1]
    return done.stdout


@pytest.mark.slow  # wandb has waits of its own beside those that can be set
def test_wandb_whose_server_never_answers(tmp_path):
    with Silent() as server:
        assert "wandb did not start" in logged_by_a_process(
            tmp_path, server.address, "WANDB_INIT_TIMEOUT=5"
        )


def test_wandb_whose_server_does_not_answer_at_the_end(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Wandb) as server:
        server.daemon_threads, server.asked, server.block_on_close = True, [], False
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        said = logged_by_a_process(tmp_path, address, "WANDB_FINISH_TIMEOUT=5")
        server.shutdown()
    assert "Timed out finishing run" in said, said
    assert any("file_stream" in path for path in server.asked)


def test_the_waits_of_wandb_are_set_and_its_silence_ends_no_run(tmp_path, monkeypatch):
    seen = {}

    class Wandb:
        @staticmethod
        def init(**_):
            seen.update({name: os.environ.get(name) for name in WANDB_ENDS})
            raise RuntimeError("giving up after 3 attempts: context deadline exceeded\nwhile")

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    monkeypatch.delenv("WANDB_INIT_TIMEOUT", raising=False)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "7")  # the user's counts
    began = time.monotonic()
    with pytest.warns(UserWarning, match="wandb did not start and is not used in this session"):
        metrics = MetricsWriter(tmp_path, make_run(("wandb",)), None)
    with metrics:
        metrics.log(1, loss=1.0)
    assert seen == {"WANDB_INIT_TIMEOUT": "90", "WANDB_FINISH_TIMEOUT": "7"}
    assert len(read(tmp_path / "metrics.jsonl")) == 1 and time.monotonic() - began < 30
