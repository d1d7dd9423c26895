"""Whoever reads a run directory leaves no trace in it: a run that trains there does not notice."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.checkpoint.hashes import HASHES
from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.errors import UserError
from lmwright.formats.weights import load_run_weights
from lmwright.train import session
from tests.resume.small_runs import in_dir, losses


def busy(run, folder, steps):
    """A run that saves after every step and keeps one checkpoint."""
    policy = replace(run.checkpoint, save_every_steps=1, keep_last=1)
    every = replace(run.train, steps=steps)
    quiet = replace(run.eval, every_steps=None)
    return replace(in_dir(run, folder), checkpoint=policy, train=every, eval=quiet)


def digest(weights):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(weights):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def damaged_ones(run):
    return list(Path(run.dir).glob("checkpoints.damaged/*"))


def test_readers_beside_a_run_that_saves(small_run, tmp_path, monkeypatch):
    run = busy(small_run, tmp_path / "run", steps=25)
    saved, outcomes, save = {}, [], session.Checkpoints.save

    def noted(self, step, state, meta):
        saved[step] = digest(state["trained"]["model"]["weights"])
        save(self, step, state, meta)

    monkeypatch.setattr(session.Checkpoints, "save", noted)
    training = threading.Thread(
        target=lambda: outcomes.append(session.train(run, jax.devices()[:1])), daemon=True
    )
    training.start()
    seen = []
    while training.is_alive():
        try:
            seen.append(digest(load_run_weights(run.dir)[1]))
        except UserError as error:  # not yet begun
            assert not seen and ("no run.toml" in str(error) or "no checkpoint yet" in str(error))
            time.sleep(0.05)
    assert [one.exit_code for one in outcomes] == [0]
    assert len(seen) >= 3 and set(seen) <= set(saved.values())
    assert sorted(losses(run)) == list(range(1, 26))
    assert digest(load_run_weights(run.dir)[1]) == saved[25]
    assert not damaged_ones(run)
    assert [p.name for p in (Path(run.dir) / "checkpoints").iterdir()] == ["25"]


@pytest.mark.slow
def test_a_thousand_reads_beside_a_run_in_another_process(small_run, tmp_path):
    run = busy(small_run, tmp_path / "run", steps=1_000_000)
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(replace(run, metrics=replace(run.metrics, log_every_steps=50))))
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    training = subprocess.Popen(
        [sys.executable, "-m", "lmwright", "train", str(file)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": flags},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        checkpoints = Path(run.dir) / "checkpoints"
        while not (checkpoints.is_dir() and any(p.name.isdigit() for p in checkpoints.iterdir())):
            assert training.poll() is None, training.stdout.read()
            time.sleep(0.1)
        seen = {digest(load_run_weights(run.dir)[1]) for _ in range(1000)}
        assert training.poll() is None, training.stdout.read()
    finally:
        training.send_signal(signal.SIGTERM)
    said, _ = training.communicate(timeout=120)
    assert training.returncode == 42, said
    assert "everything is saved" in " ".join(said.split()) and "damaged" not in said
    assert len(seen) > 100 and not damaged_ones(run)


def contents(folder):
    """Every file with what would tell a change."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        stat = path.stat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (stat.st_ino, stat.st_mtime_ns, data)
    return found


def harm_nothing(folder):
    """As it was saved."""


def harm_newest(folder):
    """A damaged file in the newest checkpoint."""
    (folder / "checkpoints/12/state/_METADATA").write_text("{")


def harm_hashes(folder):
    """An earlier version, killed before it wrote the hashes of its last checkpoint."""
    meta = folder / "checkpoints/12/meta/metadata"
    kept = {k: v for k, v in json.loads(meta.read_text()).items() if k != "version"}
    meta.write_text(json.dumps(kept))
    (folder / "checkpoints/12" / HASHES).unlink()


@pytest.mark.parametrize("harm", [harm_nothing, harm_newest, harm_hashes])
def test_the_verbs_that_read_change_no_file(trained_run, tmp_path, harm, capsys):
    folder = tmp_path / "run"
    shutil.copytree(trained_run.dir, folder)
    (folder / "checkpoints/13.orbax-checkpoint-tmp").mkdir()  # a save in flight
    harm(folder)
    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = contents(folder)
    assert main(["eval", str(folder)]) == 0
    assert main(["generate", str(folder), "--prompt", "abc", "--max-new-tokens", "2"]) == 0
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert main(["report", str(folder), "--out", str(tmp_path / "report.html")]) == 0
    origin = replace(trained_run.train, init_from=str(folder), steps=1)
    session.train(replace(trained_run, dir=str(tmp_path / "next"), train=origin), jax.devices()[:1])
    assert contents(folder) == before
    said = capsys.readouterr().err
    assert ("checkpoint 12 is damaged" in said) == (harm is harm_newest)
    assert ("checkpoint 12 has no hashes" in said) == (harm is harm_hashes)
