"""A Hugging Face hub on loopback that holds one dataset or model: just what clients ask for."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """`files`: path in `repo` -> bytes. `asked` lists the requested paths. With a `token` the
    repository is gated: those who do not send it are turned away."""

    def __init__(
        self, repo: str, files: dict[str, bytes], kind: str = "datasets", token: str | None = None
    ):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo, self.files, self.asked = repo, files, []
        self.kind, self.token = kind, token
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def entries(self, folder: str, recursive: bool) -> list[dict]:
        prefix = f"{folder}/" if folder else ""
        found = {}
        for path in self.files:
            if path.startswith(prefix):
                parts = path.removeprefix(prefix).split("/")
                for depth in range(1, len(parts)):
                    if recursive or depth == 1:
                        name = prefix + "/".join(parts[:depth])
                        found[name] = {"type": "directory", "path": name, "size": 0, "oid": SHA}
                if recursive or len(parts) == 1:
                    found[path] = self.entry(path)
        return list(found.values())

    def entry(self, path: str) -> dict:
        raw = self.files[path]
        oid = hashlib.sha1(raw).hexdigest()
        return {"type": "file", "path": path, "size": len(raw), "oid": oid}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.route(b"")

    def do_GET(self):
        self.route(b"")

    def do_POST(self):
        self.route(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def route(self, body):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        api, files = f"/api/{hub.kind}/{hub.repo}", f"/{hub.kind}/{hub.repo}/resolve/"
        files = files.removeprefix("/models")
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.missing("GatedRepo", 403)
        elif path == f"{api}/revision/nowhere":
            self.missing("RevisionNotFound")
        elif path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": p} for p in hub.files]
            about = {"id": hub.repo, "sha": SHA, "private": False, "tags": [], "siblings": siblings}
            self.json(about)
        elif path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            found = hub.entries(folder, "recursive=true" in self.path.lower())
            self.json(found) if found else self.missing("EntryNotFound")
        elif path.startswith(f"{api}/paths-info/"):
            wanted = self.paths(body)
            folders = {e["path"]: e for e in hub.entries("", True)}
            self.json([folders[p] for p in wanted if p in folders])
        elif path.startswith(files):
            self.file(path.removeprefix(files).partition("/")[2])
        else:
            self.missing("EntryNotFound" if hub.repo in path else "RepoNotFound")

    def paths(self, body):
        if body.startswith(b"{"):
            return json.loads(body)["paths"]
        pairs = [pair.split("=", 1) for pair in body.decode().split("&")]
        return [unquote(value.replace("+", " ")) for key, value in pairs if key == "paths"]

    def json(self, found):
        self.reply(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def missing(self, code, status=404):
        self.reply(status, b"{}", {"X-Error-Code": code})

    def file(self, path):
        raw = self.server.files.get(path)
        if raw is None:
            self.missing("EntryNotFound")
            return
        etag = hashlib.sha1(raw).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if not wanted:
            self.reply(200, raw, headers)
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        start, stop = int(first), min(len(raw), int(last) + 1 if last else len(raw))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(raw)}"
        self.reply(206, raw[start:stop], headers)

    def reply(self, status, body, headers):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass
