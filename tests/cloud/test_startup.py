"""The startup script of hosts, where packages do not install, transfers stand still, or nothing
works at all. The Python and pip that it unpacks are played."""

import io
import tarfile
import time

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from lmwright.cloud.book import id_of, label_of
from lmwright.cloud.tpu_api import ENDPOINT, Tpus
from lmwright.cloud.watch import last_words
from lmwright.storage.bucket import Bucket
from tests.cloud.fake_tpu import TOKEN
from tests.cloud.played import offer

PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
cat >"$3/bin/pip" <<'END'
#!/bin/sh
echo try >>"$LMWRIGHT_HOME/tries"
[ "$(wc -l <"$LMWRIGHT_HOME/tries")" -gt FAILURES ] && exit 0
echo 'ERROR: No matching distribution found for jax' >&2
exit 1
END
cat >"$3/bin/python" <<'END'
#!/bin/sh
echo served >>"$LMWRIGHT_HOME/served"
echo no module
exit CODE
END
chmod +x "$3/bin/pip" "$3/bin/python"
"""


def archive(**files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz" if "python" in files else "w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo("python/bin/python3" if name == "python" else name)
            entry.size, entry.mode = len(text.encode()), 0o755
            tar.addfile(entry, io.BytesIO(text.encode()))
    return data.getvalue()


@pytest.fixture
def boot(spec, url, tpu, tmp_path):
    """Starts a host whose pip fails so often; returns its home and the name of its slice."""

    def start(failures=0, code=0, folder="code", **variables):
        bucket = Bucket(f"{url}/{folder}/abc")
        python = PYTHON.replace("FAILURES", str(failures)).replace("CODE", str(code))
        bucket.write("python.tar.gz", archive(python=python))
        bucket.write("wheels.tar", archive())
        bucket.write("lmwright.tar", archive(**{"hosts.lock": "", "lmwright-1.whl": ""}))
        tpu.home, tpu.hosts = tmp_path / "hosts", 1
        tpu.variables = {"LMWRIGHT_PAUSE_S": "0.1", **variables}
        tpu.variables[ENDPOINT] = f"http://{tpu.server.address}/"
        id = id_of(spec, 1)
        job = spec.url if folder == "code" else f"{url}/{folder}/jobs/j"
        facts = {"lmwright-job": job, "lmwright-slice": id, "lmwright-code": bucket.url}
        service = Tpus(spec.cloud)
        service.create(id, label_of(spec), offer(), facts)
        while not tpu.active():
            service.request("us-central2-b", id)
        return tmp_path / "hosts" / f"{id}-0" / "opt", id

    return start


def wait_for(condition, what=lambda: ""):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def test_an_installation_that_fails_is_told_and_tried_again(boot, spec):
    home, id = boot(failures=2)
    wait_for((home / "served").exists, (home / "console.log").read_text)
    said = last_words(Bucket(spec.url), id)
    assert "No matching distribution found for jax" in said and f"console/{id}-" in said
    assert (home / "tries").read_text().count("try") == 4  # the packages, and lmwright itself


def test_a_folder_of_any_name_is_read_and_written(boot, url):
    """Signs that a URL cannot hold, or that mean something else in one."""
    folder = "a b/50% $x+y&z?#\u00e9"
    home, id = boot(failures=1, folder=folder)
    wait_for((home / "served").exists, (home / "console.log").read_text)
    assert "No matching distribution" in last_words(Bucket(f"{url}/{folder}/jobs/j"), id)


def test_a_host_on_which_nothing_works_for_hours_deletes_its_slice(boot, tpu):
    home, _ = boot(failures=1000, LMWRIGHT_PATIENCE_S="-1")
    wait_for(lambda: tpu.resources == {}, (home / "console.log").read_text)


def test_a_program_that_does_not_start_is_told(boot, spec):
    home, id = boot(code=1, LMWRIGHT_PATIENCE_S="3600")
    wait_for(lambda: last_words(Bucket(spec.url), id).startswith("no module (gs://"))
    wait_for(lambda: (home / "served").read_text().count("served") > 2)


def test_a_transfer_that_stands_still_is_begun_again(boot, proxy):
    proxy.faults = type(proxy.faults)(1.0, kinds=("stall",), only="python.tar.gz?alt=media", most=2)
    home, _ = boot(LMWRIGHT_STALL_S="1")
    wait_for((home / "served").exists)
    assert proxy.faults.counts["stall"] == 2


def test_a_bucket_that_refuses_the_hosts_is_told(boot, proxy):
    proxy.faults = type(proxy.faults)(1.0, kinds=("429",), only="alt=media", most=40)
    home, _ = boot()
    console = home / "console.log"
    wait_for(lambda: console.exists() and "(HTTP 429); trying again" in console.read_text())
    assert TOKEN not in console.read_text()
