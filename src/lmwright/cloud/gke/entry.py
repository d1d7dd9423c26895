"""Entry of every pod: installs this lmwright from the bucket and becomes the host's agent.

It is carried in the manifest and run by the python3 (3.8 or newer) of whatever image: it imports
nothing beyond the standard library. The pod's Kubernetes service account is its Google account, by
Workload Identity. A container that starts again finds what is installed already.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request

METADATA = "http://" + os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
ACCOUNT = METADATA + "/computeMetadata/v1/instance/service-accounts/default/"
STORAGE = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")
HOME = os.environ.get("LMWRIGHT_HOME", "/opt/lmwright")
CODE = os.environ.get("LMWRIGHT_CODE", "")
REFUSED = 401, 403, 404
PATIENCE_S = float(os.environ.get("LMWRIGHT_PATIENCE_S", "120"))  # a new binding takes a while
PARTS = ("python.tar.gz", "wheels.tar", "lmwright.tar")


def about(key):
    """Value of a key of the pod's Google account."""
    headers = {"Metadata-Flavor": "Google"}
    request = urllib.request.Request(ACCOUNT + key, headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


def copy(url, path):
    """Copies an object into a file. Raises HTTPError where it is refused."""
    bucket, _, name = url[len("gs://") :].partition("/")
    place = "/storage/v1/b/" + bucket + "/o/" + urllib.parse.quote(name, safe="") + "?alt=media"
    token = json.loads(about("token"))["access_token"]
    request = urllib.request.Request(STORAGE + place, headers={"Authorization": "Bearer " + token})
    with urllib.request.urlopen(request, timeout=60) as answer, open(path, "wb") as file:
        shutil.copyfileobj(answer, file)


def fetch(url, path):
    """Copies an object, in spite of faults that pass."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return copy(url, path)
        except urllib.error.HTTPError as error:
            reason = "%s %s" % (error.code, error.reason)  # noqa: UP031
            if error.code in REFUSED and time.monotonic() > end:
                cure = "give their service account roles/storage.objectAdmin on the bucket"
                told = ": the pods cannot read it (" + reason + "); " + cure
                print("lmwright: error: " + url + told + ", by Workload Identity", flush=True)
                sys.exit(2)
        except (OSError, ValueError, KeyError) as error:
            reason = repr(error)
        print("cannot fetch " + url + " (" + reason + "); trying again", flush=True)
        time.sleep(5)


def install(here):
    """Makes the Python environment of this code."""
    shutil.rmtree(here, ignore_errors=True)
    os.makedirs(here + "/wheels")
    for part in PARTS:
        fetch(CODE + "/" + part, here + "/" + part)
        with tarfile.open(here + "/" + part) as archive:
            archive.extractall(here + "/wheels" if part == "wheels.tar" else here)
        os.remove(here + "/" + part)
    subprocess.check_call([here + "/python/bin/python3", "-m", "venv", here + "/venv"])
    pip = [here + "/venv/bin/pip", "install", "-q", "--no-index", "--no-deps"]
    lock = ["--require-hashes", "-r", here + "/hosts.lock"]
    subprocess.check_call([*pip, "--find-links", here + "/wheels", *lock])
    wheels = [name for name in os.listdir(here) if name.endswith(".whl")]
    subprocess.check_call([*pip, *(here + "/" + name for name in wheels)])
    open(here + "/ready", "w").close()


def main():
    """Installs what is missing, and becomes the agent."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the first process has no default
    here = HOME + "/" + CODE.rpartition("/")[2]
    if not os.path.exists(here + "/ready"):
        install(here)
    os.environ["XDG_STATE_HOME"] = HOME + "/state"
    os.environ["XDG_CACHE_HOME"] = HOME + "/cache"
    os.chdir(HOME)
    python = here + "/venv/bin/python"
    os.execv(python, [python, "-m", "lmwright.cloud.host"])


if __name__ == "__main__":
    main()
