"""Shells and tunnels: the real ssh to a server on loopback, and the words that gcloud gets."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from lmwright.cli.main import main
from lmwright.cloud.local import free_port
from lmwright.cloud.tunnel import Tunnel, parse_tunnel
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from tests.cloud.fake_tpu import Server
from tests.cloud.test_ssh import network, ranks  # noqa: F401


@pytest.fixture
def notebook():
    """A page on a port of the hosts, which are this machine."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"a notebook")

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.server_port
    server.shutdown()


def test_ports_are_read():
    assert parse_tunnel("8888") == Tunnel(8888, 8888)
    assert parse_tunnel("9000:8888") == Tunnel(9000, 8888)
    for text in ("0", "x", "70000", "1:0", "1:2:3", "-L1", "8888 -oProxyCommand=x"):
        with pytest.raises(UserError, match=r"--tunnel: .* is not a port; write 8888"):
            parse_tunnel(text)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")
def test_a_tunnel_through_the_users_ssh(network, notebook, capfd):  # noqa: F811
    assert ranks([[0, 0]]) == 0
    port = free_port()
    words = ["jobs", "ssh", "j", "--host", "1", "--tunnel", f"{port}:{notebook}"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # not so in a shell's background
    command = [sys.executable, "-m", "lmwright", *words]
    tunnel = subprocess.Popen(
        command, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=heard
    )
    try:
        told = tunnel.stdout.readline().decode()
        assert told == f"localhost:{port} leads to port {notebook} of host 1; Ctrl-C closes it\n"
        assert _page(port) == b"a notebook"
        assert main([*words[:-1], f"{port}:1", "true"]) == 255  # the port is taken here
        assert "Address already in use" in capfd.readouterr().err
    finally:
        os.killpg(tunnel.pid, signal.SIGINT)  # Ctrl-C
    assert tunnel.wait(20) == 0
    with pytest.raises(OSError):
        _page(port, patience_s=0.0)
    # A command beside the tunnel, as one that starts the notebook.
    words[-1] = f"{free_port()}:{notebook}"
    assert main([*words, "echo", "two  words"]) == 0
    assert "two  words" in capfd.readouterr().out


def _page(port, patience_s=20.0):
    end = time.monotonic() + patience_s
    while True:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).read()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """Words of every call of a gcloud that ends with exit code 3."""
    path = tmp_path / "bin" / "gcloud"
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\nsaid = open({str(tmp_path / 'said')!r}, 'a')\n"
        "print(json.dumps(sys.argv[1:]), file=said)\nsys.exit(3)\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    said = tmp_path / "said"
    return lambda: [json.loads(line) for line in said.read_text().splitlines()]


@pytest.fixture
def spec(url, tmp_path, monkeypatch):
    """A job on two slices of two hosts, without a slice yet."""
    pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")
    from lmwright.cloud.book import begin
    from lmwright.cloud.spec import Cloud, Offer, Spec

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    spec = Spec(
        name="j", dir="", command=("train",), hosts=4, port=0, url=f"{url}/jobs/j",
        cloud=Cloud(project="p"),
        offers=(Offer(name="2xv4-16", zone="us-central2-b", accelerator_type="v4-16", runtime="r",
                      num_slices=2, hosts_per_slice=2, num_chips=16),),
    )  # fmt: skip
    begin(spec, "", "")
    return spec


def give_slices(spec):
    """The job's request is served."""
    book = json.loads(Bucket(spec.url).read("slices.json")[0])
    book |= {"made": [{"id": "j-1", "offer": 0, "asked": 0}], "current": 0}
    Bucket(spec.url).write("slices.json", json.dumps(book))


def test_words_for_a_host_of_a_slice(spec, tmp_path, monkeypatch, gcloud, capsys):
    job = ["jobs", "ssh", spec.url]
    assert main(job) == 2
    assert "job j has no slice now" in capsys.readouterr().err
    give_slices(spec)
    assert main([*job, "--host", "3"]) == 3  # the exit code of gcloud
    assert main([*job, "--host", "1", "echo", "two  words"]) == 3
    assert main([*job, "--tunnel", "8888"]) == 3
    assert main([*job, "--tunnel", "9000:8888", "jupyter", "lab"]) == 3
    assert "localhost:9000 leads to port 8888 of host 0" in capsys.readouterr().out
    ssh = ["compute", "tpus", "tpu-vm", "ssh"]
    place = ["--zone=us-central2-b", "--project=p"]
    option = ["--", "-o", "ExitOnForwardFailure=yes", "-L"]
    assert gcloud() == [
        [*ssh, "j-1-1", "--worker=1", *place],
        [*ssh, "j-1-0", "--worker=1", *place, "--command", "echo 'two  words'"],
        [*ssh, "j-1-0", "--worker=0", *place, *option, "localhost:8888:localhost:8888", "-N"],
        [*ssh, "j-1-0", "--worker=0", *place, "--command", "jupyter lab", *option,
         "localhost:9000:localhost:8888"],
    ]  # fmt: skip
    assert main([*job, "--host", "4"]) == 2
    assert "--host: 4 is none of 0 to 3" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(job) == 2
    assert "gcloud is not installed" in capsys.readouterr().err


def test_hosts_without_external_addresses_are_told(spec, gcloud, capsys):
    """gcloud only waits for an answer then, as its help says."""
    give_slices(spec)
    here = ["jobs", "ssh", spec.url]
    assert main(here) == 3 and "internal" not in capsys.readouterr().err
    facts = json.loads(Bucket(spec.url).read("job.json")[0])
    facts["cloud"]["external_ips"] = False
    Bucket(spec.url).write("job.json", json.dumps(facts))
    assert main(here) == 3
    told = "gcloud alpha compute tpus tpu-vm ssh j-1-0 --worker=0 --zone=us-central2-b --project=p"
    assert f"{told} --tunnel-through-iap" in capsys.readouterr().err


def described(method, path, _body, _headers):
    """Answers to gcloud about a slice of two hosts."""
    keys = {"queryValue": {"items": []}}
    if "getGuestAttributes" in path:
        return 200, {"guestAttributes": [keys, keys]}
    if "/nodes/" not in path:
        return 200, {"name": "p", "commonInstanceMetadata": {"items": []}}
    ends = [{"ipAddress": f"10.0.0.{k}", "accessConfig": {"externalIp": f"192.0.2.{k}"}}
            for k in (1, 2)]  # fmt: skip
    return 200, {"name": path, "state": "READY", "id": "7", "networkEndpoints": ends}


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
@pytest.mark.slow  # gcloud takes seconds for each call
def test_gcloud_makes_the_tunnel_of_these_words(spec, tmp_path, monkeypatch, capfd):
    give_slices(spec)
    real, shim = shutil.which("gcloud"), tmp_path / "bin" / "gcloud"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/bash\nexec {real} "${{@:1:4}}" --dry-run --quiet "${{@:5}}"\n')
    shim.chmod(0o755)
    service = Server(described)
    for name in ("TPU", "COMPUTE"):
        path = "compute/v1/" if name == "COMPUTE" else ""
        where = f"http://{service.address}/{path}"
        monkeypatch.setenv(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}", where)
    monkeypatch.setenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    job = ["jobs", "ssh", spec.url, "--host", "1", "--tunnel", "9000:8888"]
    assert main(job) == 0
    forward = "@192.0.2.2 -o ExitOnForwardFailure=yes -L localhost:9000:localhost:8888"
    assert f"{forward} -N" in capfd.readouterr().out
    assert main([*job, "jupyter", "lab"]) == 0
    assert f"{forward} -- jupyter lab" in capfd.readouterr().out
    service.shutdown()
