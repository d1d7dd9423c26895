"""Checkpoints published while the training continues: nothing that fails there ends it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from lmwright.config.run import Checkpoint, Publish
from lmwright.errors import UserError
from lmwright.program.lora_section import LowRank
from lmwright.program.qat_section import Qat
from lmwright.train import publishing
from lmwright.train.session import train
from tests.fake_hub import WritableHub
from tests.publish.conftest import TOKEN

# stands in for `lmwright publish`: fails as long as there is a file `down`
PUBLISH = """
import pathlib, sys
place = pathlib.Path(sys.argv[-1])
assert (place / "state").is_dir()
if place.parents[1].with_name("down").exists():
    sys.exit("lmwright: error: me/tiny: the hub is down")
with place.parents[1].with_name("published").open("a") as file:
    file.write(place.name + " ")
"""


@pytest.fixture
def run(tiny, tmp_path):
    """A run of four steps that saves each and publishes every second."""
    return replace(
        tiny,
        dir=str(tmp_path / "run"),
        train=replace(tiny.train, publish_every_steps=2),
        checkpoint=Checkpoint(save_every_steps=1, keep_last=4),
        publish=Publish(repo="me/tiny", license="mit"),
    )


@pytest.fixture
def stand_in(hub, monkeypatch):
    """`lmwright publish` that keeps a list, and steps that wait for it."""
    start = subprocess.Popen

    def popen(words, **options):
        if "publish" in words:
            assert words[1:4] == ["-m", "lmwright", "publish"]
            assert options["env"]["JAX_PLATFORMS"] == "cpu"
            words = [sys.executable, "-c", PUBLISH, words[-1]]
        return start(words, **options)

    monkeypatch.setattr(publishing.subprocess, "Popen", popen)
    monkeypatch.setattr(publishing, "PATIENCE_S", 0.05)
    begin = publishing.Publisher._begin

    def begin_and_wait(self, step):
        begin(self, step)
        self._attempt.join()

    monkeypatch.setattr(publishing.Publisher, "_begin", begin_and_wait)


def events(run):
    lines = map(json.loads, (Path(run.dir) / "metrics.jsonl").read_text().splitlines())
    return [(line["kind"], line["step"]) for line in lines if "publish" in line["kind"]]


def test_every_second_step_and_the_last(run, stand_in, tmp_path):
    run = replace(run, train=replace(run.train, steps=5))
    assert train(run, jax.devices()[:1]).exit_code == 0
    assert (tmp_path / "published").read_text() == "2 4 5 "
    assert events(run) == [("published", 2), ("published", 4), ("published", 5)]


def test_failures_are_told_once_and_tried_again(run, stand_in, tmp_path, capsys):
    (tmp_path / "down").touch()
    assert train(run, jax.devices()[:1]).exit_code == 0
    told = capsys.readouterr().out
    assert told.count("was not published: me/tiny: the hub is down; training continues") == 1
    assert events(run) == [("publish failed", 2), ("publish failed", 4), ("publish failed", 4)]


def test_what_cannot_work_is_refused_before_training(run, hub, monkeypatch):
    for publish, part in (
        (replace(run.publish, repo="tiny"), "is not a name on the hub"),
        (replace(run.publish, license="mti"), "publish.license: 'mti' is not a license"),
    ):
        with pytest.raises(UserError, match=part):
            train(replace(run, publish=publish), jax.devices()[:1])
    tuned = replace(run, lora=LowRank(rank=3))
    for lora, part in (
        (tuned, "whose base train.init_from has no name on the hub"),
        (replace(tuned, qat=Qat(weights="int8")), "which writes the merged model"),
    ):
        with pytest.raises(UserError, match=part):
            train(lora, jax.devices()[:1])
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="no token for the hub"):
        train(run, jax.devices()[:1])
    assert not Path(run.dir).exists() and not hub.asked


@pytest.mark.slow
def test_the_real_command(run, tmp_path, monkeypatch):
    """In processes of their own, against the hub on loopback; no file of the run has the token."""
    with WritableHub(TOKEN) as hub:
        variables = {
            "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert train(run, jax.devices()[:1]).exit_code == 0
        assert ("published", 4) in events(run), (Path(run.dir) / "publish.log").read_text()
        titles = [commit.title for commit in hub.repos["me/tiny"].branches["main"]]
        assert titles[-1] == "lmwright publish: step 4 of tiny"
        assert b"| steps | 4 |" in hub.files("me/tiny")["README.md"]
        assert not any(TOKEN.encode() in body for body in hub.bodies)
    files = [path for path in Path(run.dir).rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)
