"""Standby: supervises the job that the metadata of a VM name, until it is over.

While another supervisor is alive it waits, and takes the job up when that one is gone. Whatever
fails is told on the console, and tried again.
"""

import time

from lmwright.cloud import metadata, remote
from lmwright.cloud.spec import OVER
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from lmwright.storage.claim import Claimed

PAUSE_S = 30.0


def watch(url: str) -> None:
    """Watches a job; returns once it is over and has no slice, or no longer exists."""
    while Bucket(url).entry("job.json") is not None:
        spec = remote.adopt(url)
        try:
            remote.follow(spec)
            if remote.state_of(spec)["status"] in OVER:
                return
        except Claimed as error:
            print(f"waiting: {error}", flush=True)
        time.sleep(PAUSE_S)


def main() -> None:
    """Watches; what is refused, as by a service that is down, is tried again."""
    url = metadata.attribute("lmwright-job")
    while url:
        try:
            watch(url)
            return
        except UserError as error:
            print(f"lmwright: error: {error}", flush=True)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
