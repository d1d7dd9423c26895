"""Hugging Face hubs on loopback: one that holds a dataset or model, and one that is written to."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """`files`: path in `repo` -> bytes. `asked` lists the requested paths, `given` the tokens. With
    a `token` the repository is gated: those who do not send it are turned away."""

    def __init__(
        self, repo: str, files: dict[str, bytes], kind: str = "datasets", token: str | None = None
    ):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo, self.files, self.asked = repo, files, []
        self.kind, self.token, self.given = kind, token, set()
        self.sha, self.before = SHA, {}
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def commit(self, files: dict[str, bytes], sha: str) -> None:
        """The name stands for other files; the earlier ones are had by their commit."""
        self.before[self.sha] = self.files
        self.files, self.sha = files, sha

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
        hub.given.add(self.headers.get("Authorization"))
        api, files = f"/api/{hub.kind}/{hub.repo}", f"/{hub.kind}/{hub.repo}/resolve/"
        files = files.removeprefix("/models")
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.missing("GatedRepo", 403)
        elif path == f"{api}/revision/nowhere":
            self.missing("RevisionNotFound")
        elif path == api or path.startswith(f"{api}/revision/"):
            asked = path.rpartition("/")[2]
            siblings = [{"rfilename": p} for p in hub.before.get(asked, hub.files)]
            sha = asked if asked in hub.before else hub.sha
            about = {"id": hub.repo, "sha": sha, "private": False, "tags": [], "siblings": siblings}
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
            revision, _, name = path.removeprefix(files).partition("/")
            self.file(name, revision)
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

    def file(self, path, revision):
        hub = self.server
        raw = hub.before.get(revision, hub.files).get(path)
        if raw is None:
            self.missing("EntryNotFound")
            return
        etag = hashlib.sha1(raw).hexdigest()
        sha = revision if revision in hub.before else hub.sha
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
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


@dataclass
class Commit:
    """A state of a branch."""

    title: str
    files: dict[str, bytes]

    @property
    def sha(self) -> str:
        told = [self.title, sorted((p, hashlib.sha1(b).hexdigest()) for p, b in self.files.items())]
        return hashlib.sha1(json.dumps(told).encode()).hexdigest()


@dataclass
class Repo:
    """A model repository; branches hold their commits, newest last."""

    private: bool
    branches: dict[str, list[Commit]] = field(
        default_factory=lambda: {"main": [Commit("initial commit", {".gitattributes": b"*"})]}
    )


class WritableHub(ThreadingHTTPServer):
    """Takes what one account, whose token is known, writes to its repositories. `refused` maps a
    part of "METHOD path" to the status that is answered there. `bodies` has all that was sent but
    the header with the token."""

    def __init__(self, token: str, name: str = "me", role: str = "write"):
        super().__init__(("127.0.0.1", 0), _Writing)
        self.token, self.name, self.role = token, name, role
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.refused: dict[str, int] = {}
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.before_commit = lambda repo: None
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """The files of the newest commit."""
        return self.repos[repo].branches[branch][-1].files

    def save(self, repo: str, folder, branch: str = "main"):
        """Writes the files that arrived to a folder."""
        for path, raw in self.files(repo, branch).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(raw)
        return folder


class _Writing(_Handler):
    def do_PUT(self):
        self.do_POST()

    def route(self, body):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        asked = f"{self.command} {path}"
        others = {k: v for k, v in self.headers.items() if k.lower() != "authorization"}
        hub.asked.append(asked)
        hub.bodies += [body, json.dumps(others).encode(), self.path.encode()]
        for part, status in hub.refused.items():
            if part in asked:
                self.reply(status, b"{}", {"Content-Type": "application/json"})
                return
        if path.startswith("/blob/"):
            hub.blobs[path.removeprefix("/blob/")] = body
            self.json({})
        elif self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.reply(401, b"{}", {"Content-Type": "application/json"})
        else:
            is_json = body and "ndjson" not in self.headers.get("Content-Type", "")
            self.account(path, json.loads(body) if is_json else {}, body)

    def account(self, path, told, body):
        hub = self.server
        if path == "/api/whoami-v2":
            access = {"accessToken": {"role": hub.role}}
            self.json({"name": hub.name, "orgs": [{"name": "team"}], "auth": access})
        elif path == "/api/validate-yaml":
            self.json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            name = f"{told.get('organization') or hub.name}/{told['name']}"
            if name in hub.repos:
                url = json.dumps({"url": f"{hub.url}/{name}"}).encode()
                self.reply(409, url, {"Content-Type": "application/json"})
            else:
                hub.repos[name] = Repo(told["visibility"] == "private")
                self.json({"url": f"{hub.url}/{name}"})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self.json({"objects": [self.large(each) for each in told["objects"]]})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/?(.*)", path):
            if match[1] in hub.repos:
                self.repo(match[1], hub.repos[match[1]], match[2], told, body)
            else:
                self.missing("RepoNotFound")

    def large(self, asked):
        if asked["oid"] in self.server.blobs:
            return asked
        return asked | {"actions": {"upload": {"href": f"{self.server.url}/blob/{asked['oid']}"}}}

    def repo(self, name, repo, path, told, body):
        verb, _, branch = path.partition("/")
        commits = repo.branches.get(branch or "main")
        if verb == "auth-check":
            self.json({})
        elif verb == "refs":
            refs = [
                {"name": b, "ref": f"refs/heads/{b}", "targetCommit": c[-1].sha}
                for b, c in repo.branches.items()
            ]
            self.json({"branches": refs, "converts": [], "tags": []})
        elif verb == "branch":
            commits = repo.branches["main"]
            start = [c.sha for c in commits].index(told.get("startingPoint", commits[-1].sha))
            repo.branches[branch] = commits[: start + 1]
            self.json({})
        elif commits is None:
            self.missing("RevisionNotFound")
        elif verb in ("", "revision"):
            siblings = [{"rfilename": p} for p in commits[-1].files]
            about = {"id": name, "sha": commits[-1].sha, "private": repo.private, "tags": []}
            self.json(about | {"siblings": siblings})
        elif verb == "commits":
            date = "2026-01-01T00:00:00.000Z"
            rest = {"authors": [{"user": "me"}], "date": date, "message": ""}
            self.json([{"id": c.sha, "title": c.title, **rest} for c in reversed(commits)])
        elif verb == "tree":
            self.json([self.file_entry(p, raw) for p, raw in commits[-1].files.items()])
        elif verb == "preupload":
            self.json({"files": [self.mode(each, commits[-1].files) for each in told["files"]]})
        elif verb == "commit":
            self.server.before_commit(repo)
            self.commit(name, repo.branches[branch], body)

    def mode(self, asked, files):
        is_large = any(fnmatch(asked["path"], p) for p in ("*.safetensors", "*.gguf"))
        answer = {"path": asked["path"], "shouldIgnore": False}
        answer["uploadMode"] = "lfs" if is_large else "regular"
        raw = files.get(asked["path"])
        if raw is not None:
            blob = b"blob %d\0" % len(raw) + raw
            answer["oid"] = (hashlib.sha256(raw) if is_large else hashlib.sha1(blob)).hexdigest()
        return answer

    def file_entry(self, path, raw):
        oid = hashlib.sha1(raw).hexdigest()
        return {"type": "file", "path": path, "size": len(raw), "oid": oid}

    def commit(self, name, commits, body):
        header, *lines = map(json.loads, body.splitlines())
        if header["value"].get("parentCommit", commits[-1].sha) != commits[-1].sha:
            self.reply(412, b'{"error": "A commit has happened since"}', {})
            return
        files = dict(commits[-1].files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            else:
                del files[value["path"]]
        commits.append(Commit(header["value"]["summary"], files))
        sha = commits[-1].sha
        self.json({"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})
