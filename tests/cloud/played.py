"""A supervisor of slices, whose hosts are played by the test."""

import json
import time
from dataclasses import replace

from lmwright.cloud.book import MADE, id_of
from lmwright.cloud.slices import Patience, Slices
from lmwright.cloud.spec import Offer
from lmwright.config.load import dump_toml
from lmwright.config.run import Checkpoint
from lmwright.storage.bucket import Bucket

QUICK = Patience(
    poll=0.01, first_word=0.5, silence=0.5, repair=0.2, elsewhere=0.2, stop=0.3, backoff=0.05
)


def offer(zone="us-central2-b", name="v4-16"):
    return Offer(
        name=name, zone=zone, accelerator_type=name, runtime="tpu-ubuntu2204-base",
        hosts_per_slice=2, num_chips=8, price=3.0,
    )  # fmt: skip


def run_in_bucket(small_run, url, data_dir, tmp_path):
    """A run in the bucket with its run file, whose data are anywhere."""
    run = replace(
        small_run,
        dir=f"{url}/run",
        data=replace(small_run.data, dir=data_dir),
        train=replace(small_run.train, global_batch_size=16, num_microbatches=1),
        checkpoint=Checkpoint(save_every_steps=3),
    )
    (tmp_path / "run.toml").write_text(dump_toml(run))
    return run


class Killed(BaseException):
    """The supervisor is killed."""


def killed_after(calls):
    """A decorator of functions that together can be called so many times."""
    count = iter(range(calls))

    def counted(call):
        def wrapper(*args, **options):
            if next(count, None) is None:
                raise Killed
            return call(*args, **options)

        return wrapper

    return counted


class Played:
    """A supervisor whose hosts are played by the test."""

    def __init__(self, spec):
        self.told, self.bucket, self.spec = [], Bucket(spec.url), spec
        self.first, self.second = id_of(spec, 1), id_of(spec, 2)
        self.slices = Slices(spec, self.told.append, QUICK)

    def until(self, condition, speak=True):
        """Steps until `condition()`; the hosts of an active slice speak meanwhile."""
        end, number = time.monotonic() + 20, -1
        while time.monotonic() < end:
            number += 1
            if self.slices.step() is not None:
                assert condition(), self.told
                return
            if condition():
                return
            if speak and speak is not True:
                speak(number)
            time.sleep(0.001)
        raise AssertionError(self.told)

    def state(self, **facts):
        state = {"status": "running", "attempt": 1, "failures": 0, "step": 0, "saved": 0}
        self.bucket.write("state.json", json.dumps(state | {"error": ""} | facts))

    def beat(self, number):
        self.state(step=0, time=number)

    @property
    def book(self):
        return json.loads(self.bucket.read(MADE)[0])
