"""Kaggle on loopback, for its real client: datasets, kernels whose sessions run as a test says, the
quota, outputs and logs."""

import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from lmwright.cloud.kaggle import launch
from lmwright.cloud.spec import Limits

USER, TOKEN = "acme", "KGAT_verysecretTOKENverysecret"
RPC = re.compile(r"/api/v1/[a-z]+\.\w+/(\w+)")


@dataclass
class Session:
    """A session of a kernel."""

    request: dict
    state: str = "QUEUED"
    message: str = ""
    log: str = ""
    files: dict[str, bytes | Path] = field(default_factory=dict)

    @property
    def settings(self) -> dict:
        """What its script is told."""
        line = next(x for x in self.request["text"].splitlines() if x.startswith("SETTINGS"))
        return json.loads(ast.literal_eval(line.partition("json.loads(")[2][:-1]))


class FakeKaggle(ThreadingHTTPServer):
    """`play(fake, session)` is what happens in a session, once it was asked for three times how it
    stands. `bodies` has all that was ever sent here; `refusals` answers a method with (status,
    message), `lost` loses its next answer."""

    def __init__(self, token: str, play):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token, self.play = token, play
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.sessions: dict[str, list[Session]] = {}
        self.blobs: dict[str, tuple[str, bytes]] = {}
        self.quota: tuple[float, float] | None = (0.0, 72000.0)
        self.refusals: dict[str, tuple[int, str]] = {}
        self.lost: list[str] = []
        self.asked: list[str] = []
        self.downloads: list[str] = []
        self.bodies: list[bytes] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def IntrospectToken(self, q):
        good = q["token"] == self.token
        return {"active": good, "username": USER if good else ""}

    def GetAcceleratorQuotaStatistics(self, q):
        if self.quota is None:
            return {}
        used, total = self.quota
        times = {"timeUsed": f"{used:g}s", "totalTimeAllowed": f"{total:g}s", "hasEverRun": True}
        return {"quotaRefreshTime": "2026-11-28T00:00:00Z", "tpuQuota": times}

    def GetDatasetStatus(self, q):
        slug = q["datasetSlug"]
        return {"status": "READY"} if slug in self.datasets else (404, "no such dataset")

    def StartBlobUpload(self, q):
        token = f"blob-{len(self.blobs)}"
        self.blobs[token] = q["name"], b""
        return {"token": token, "createUrl": f"{self.url}/upload/{token}"}

    def CreateDataset(self, q):
        self.datasets[q["slug"]] = dict(self.blobs[f["token"]] for f in q.get("files", ()))
        self.private[q["slug"]] = q["isPrivate"]
        return {"ref": f"{USER}/{q['slug']}", "status": "ok"}

    def GetDataset(self, q):
        if q["datasetSlug"] not in self.datasets:
            return 403, "Permission 'datasets.get' was denied"
        return {"currentVersionNumber": 3}

    def ListDatasetFiles(self, q):
        files, page = self.datasets[q["datasetSlug"]], int(q.get("pageToken") or 0)
        names = list(files)[page : page + 2]
        listed = [{"name": name, "totalBytes": len(files[name])} for name in names]
        after = str(page + 2) if page + 2 < len(files) else ""
        return {"datasetFiles": listed, "nextPageToken": after}

    def DownloadDataset(self, q):
        assert q["raw"] and q["datasetVersionNumber"] == 3
        self.downloads.append(q["fileName"])
        return self.datasets[q["datasetSlug"]][q["fileName"]]

    def DeleteDataset(self, q):
        del self.datasets[q["datasetSlug"]]
        return {}

    def SaveKernel(self, q):
        lacks = [s for s in q["datasetDataSources"] if s.split("/")[1] not in self.datasets]
        versions = self.sessions.setdefault(q["slug"], [])
        versions.append(Session(q))
        address = f"https://www.kaggle.com/code/{q['slug']}"
        return {"url": address, "versionNumber": len(versions), "invalidDatasetSources": lacks}

    def GetKernelSessionStatus(self, q):
        versions = self.sessions.get(f"{q['userName']}/{q['kernelSlug']}")
        if not versions:
            return 404, "no such kernel"
        session = versions[-1]
        if session.state == "QUEUED":
            session.state = "RUNNING"
            return {"status": "QUEUED"}
        if session.state == "RUNNING" and not session.log:
            session.log = "begun\n"
            self.play(self, session)
        return {"status": session.state, "failureMessage": session.message}

    def ListKernelSessionOutput(self, q):
        session = self.sessions[f"{q['userName']}/{q['kernelSlug']}"][-1]
        if session.state != "COMPLETE":
            return {"files": [], "log": session.log}
        names = sorted(session.files)
        page = int(q.get("pageToken") or 0)
        files = [
            {"fileName": name, "url": f"{self.url}/output/{q['kernelSlug']}/{name}"}
            for name in names[page : page + 1]
        ]
        after = str(page + 1) if page + 1 < len(names) else ""
        return {"files": files, "log": session.log, "nextPageToken": after}

    def output(self, slug: str, name: str) -> bytes:
        content = self.sessions[f"{USER}/{slug}"][-1].files[name]
        return content if isinstance(content, bytes) else content.read_bytes()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        fake, path = self.server, unquote(self.path)
        fake.asked.append(f"GET {path}")
        if match := re.fullmatch(r"/output/([^/]+)/(.+)", path):
            self.answer(200, fake.output(*match.groups()), "application/octet-stream")
        elif match := re.fullmatch(r"/api/v1/kernels/logs/stream/(.+)", path):
            events = [{"data": line} for line in fake.sessions[match[1]][-1].log.splitlines()]
            self.answer(200, json.dumps(events).encode(), "application/json")
        else:
            self.answer(404, b"")

    def do_PUT(self):
        body = self.body()
        token = self.path.rpartition("/")[2]
        self.server.blobs[token] = self.server.blobs[token][0], body
        self.answer(400 if "upload" in self.server.refusals else 200, b"")

    def do_POST(self):
        fake, body = self.server, self.body()
        name = RPC.fullmatch(self.path)[1]
        fake.asked.append(name)
        if name in fake.refusals:
            answer = fake.refusals[name]
        elif name != "IntrospectToken" and self.headers["Authorization"] != f"Bearer {fake.token}":
            answer = 401, "Unauthorized"
        else:
            answer = getattr(fake, name)(json.loads(body))
            if name in fake.lost:
                fake.lost.remove(name)
                answer = 503, "the answer is lost"
        if isinstance(answer, tuple):
            status, message = answer
            answer = {"code": status, "message": message}
            self.answer(status, json.dumps(answer).encode())
        elif isinstance(answer, bytes):
            self.answer(200, answer, "application/octet-stream")
        else:
            self.answer(200, json.dumps(answer).encode())

    def body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.path.endswith("IntrospectToken"):  # which the token is for
            self.server.bodies.append(data)
        return data

    def answer(self, status, data, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def run_script(fake: FakeKaggle, session: Session, root: Path, stop_at: str = "") -> None:
    """Runs the script of a session as Kaggle does, in folders of this machine and on its CPUs, and
    tells it to end when it prints `stop_at`."""
    inputs, outputs = root / "input", root / "working"
    for folder in (inputs, outputs, root / "tmp"):
        folder.mkdir(parents=True)
    for source in session.request["datasetDataSources"]:
        mount(inputs / "datasets" / source, fake.datasets[source.split("/")[1]])
    for source in session.request.get("kernelDataSources", ()):
        slug = source.split("/")[1]
        names = fake.sessions[source][-1].files
        mount(inputs / "notebooks" / source, {name: fake.output(slug, name) for name in names})
    text = session.request["text"].replace("/kaggle/input", str(inputs))
    text = text.replace("/kaggle/working", str(outputs)).replace("tpu,cpu", "cpu")
    (root / "kernel.py").write_text(text)
    process = subprocess.Popen(
        [sys.executable, str(root / "kernel.py")],
        env=os.environ | {"TMPDIR": str(root / "tmp")},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        session.log += line
        if stop_at and stop_at in line:
            process.terminate()
    session.state = "ERROR" if process.wait() else "COMPLETE"
    session.files = {path.name: path for path in outputs.iterdir()}


def mount(folder: Path, files: dict[str, bytes]) -> None:
    """Puts files where a session reads them."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def archive(step):
    """A run directory with a checkpoint."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        info = tarfile.TarInfo(f"checkpoints/{step}/weights")
        packed.addfile(info, io.BytesIO())
    return buffer.getvalue()


def end(session, code, step, *, saved=None, error=""):
    """Ends a session as the script would have."""
    saved = step if saved is None else saved
    told = session.settings
    name = f"run-{told['job']}-{told['session']}.lmw"
    result = {
        "job": told["job"], "session": told["session"], "code": code, "error": error,
        "step": step, "saved": saved, "archive": name,
    }  # fmt: skip
    session.files = {name: archive(saved), "session.json": json.dumps(result).encode()}
    session.state, session.log = "COMPLETE", f"session {told['session']} is over\n"


def play_to_the_end(fake, session):
    """A session in which the run is done."""
    end(session, 0, 4)


def launched(run, name="cats", **options):
    """The job of a run after its launch."""
    return launch.launch(run, name, Limits(), **options)
