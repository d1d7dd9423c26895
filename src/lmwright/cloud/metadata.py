"""Metadata: what a host of Google Cloud is told of itself, and that it is about to go.

https://cloud.google.com/compute/docs/metadata; $GCE_METADATA_HOST leads to another server.
"""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from datetime import datetime

KEYS = ("instance/preempted", "instance/maintenance-event")
UPCOMING = "instance/upcoming-maintenance?alt=json"  # days ahead where it is scheduled
CALM = {"", "FALSE", "NONE"}
SOON_S = 120.0
TIMEOUT_S = 5.0
PATIENCE_S = 60.0


def read(key: str, patience_s: float = PATIENCE_S) -> str | None:
    """Value of a key; None where there is no such key, or nobody answers in time."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    end = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
        except (OSError, http.client.HTTPException, UnicodeDecodeError):
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
    """Reason why this host is about to go, "" if it is not, None where nobody answers. A
    maintenance notice comes only to those who ask often."""
    answers = [read(key, 0.0) for key in KEYS]
    for key, value in zip(KEYS, answers, strict=True):
        if (value or "").upper() not in CALM:
            return f"{key.rpartition('/')[2]}: {value}"
    planned = read(UPCOMING, 0.0)  # an error as long as none is planned
    if planned and (reason := _upcoming(planned)):
        return reason
    return "" if any(answer is not None for answer in answers) else None


def _upcoming(text: str) -> str:
    """Reason why an announced maintenance concerns this host now; empty if it does not yet."""
    try:
        facts = json.loads(text)
        begins = datetime.fromisoformat(facts["windowStartTime"])
        near = abs(begins.timestamp() - time.time()) < SOON_S  # the window may be hours long
        going = near or facts.get("maintenanceStatus") == "ONGOING"
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    return f"upcoming-maintenance: {facts['windowStartTime']}" if going else ""
