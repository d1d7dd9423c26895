"""A tokenizer's training that is asked to stop: the library would train on to its end."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.data.user_run import write_run

LONG_S = 60  # more than a stop takes, and less than the training


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM", marks=pytest.mark.slow),  # ended it before
    ],
)
def test_a_training_that_is_asked_to_stop_ends(tmp_path, number, code):
    write_run(tmp_path)
    letters = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=3_000_000))
    with (tmp_path / "words.jsonl").open("a") as f:  # one word, in which each merge is a search
        f.write(json.dumps({"text": letters}) + "\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "lmwright", "tokenizer", "train", "run.toml"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    me = psutil.Process(process.pid)
    try:
        while not list((tmp_path / "data/tokenizer/tmp").glob("*")):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        time.sleep(3)
        left = me.children(recursive=True)
        process.send_signal(number)
        said = process.communicate(timeout=LONG_S)[0]
    finally:
        process.kill()
    assert process.returncode == code and "Traceback" not in said
    assert ("interrupted; run the same command again" in said) == (number == signal.SIGINT)
    assert not psutil.wait_procs(left, timeout=10)[1]
    assert not list((tmp_path / "data/tokenizer").glob("*.json.*"))
    assert not (tmp_path / "data/tokenizer/tokenizer.json").exists()
