"""What is measured of a run in a bucket, by two machines at once."""

import json

from lmwright.report import measured
from lmwright.report.measured import EVALS_FILE, keep_measured
from lmwright.storage.bucket import Bucket
from lmwright.storage.mirror import fetched
from tests.report.test_long_context import NEEDLE


def test_another_machine_measures_meanwhile(url, monkeypatch):
    bucket, merged = Bucket(url), measured._merged
    bucket.write("run.toml", "")
    folder = fetched(url)
    theirs = [json.dumps(NEEDLE | {"step": step, "time": 0}) + "\n" for step in (1, 2)]
    bucket.write(EVALS_FILE, theirs[0])  # after this machine has fetched the run
    calls = []

    def meanwhile(before, new):
        if not calls:
            bucket.write(EVALS_FILE, "".join(theirs))
        calls.append(before)
        return merged(before, new)

    monkeypatch.setattr(measured, "_merged", meanwhile)
    keep_measured(folder, 3, [NEEDLE], None)
    lines = bucket.read(EVALS_FILE)[0].decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert len(calls) == 2
