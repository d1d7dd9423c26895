"""Metadata: what a host of Google Cloud is told of itself, and that it is about to go.

https://cloud.google.com/compute/docs/metadata; $GCE_METADATA_HOST leads to another server.
"""

import os
import re
import time
import urllib.error
import urllib.request

KEYS = ("instance/preempted", "instance/maintenance-event")
CALM = {"", "FALSE", "NONE"}
TIMEOUT_S = 5.0
PATIENCE_S = 60.0


def read(key: str) -> str | None:
    """Value of a key; None where there is no such key, or nobody answers for a minute."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
        except OSError:
            pass
        if time.monotonic() > end:
            return None
        time.sleep(1.0)


def attribute(name: str) -> str | None:
    """Value that the slice was created with."""
    return read(f"instance/attributes/{name}")


def tpu_env() -> dict[str, str]:
    """Facts of the slice, such as WORKER_ID and NODE_ID."""
    lines = (attribute("tpu-env") or "").splitlines()
    pairs = (re.fullmatch(r"\s*(\w+)\s*:\s*'?(.*?)'?\s*", line) for line in lines)
    return {pair[1]: pair[2] for pair in pairs if pair}


def notice() -> str | None:
    """Why this host is about to go. A maintenance notice comes only to those who ask often."""
    for key in KEYS:
        value = read(key) or ""
        if value.upper() not in CALM:
            return f"{key.rpartition('/')[2]}: {value}"
    return None
