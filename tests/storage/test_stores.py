"""Prepared data in a bucket: pushed there, read from there, and copied while it is read."""

import gc
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.config.run import Shuffle
from lmwright.data.prepare import prepare
from lmwright.data.rows.cached import CachedPlace, cache_folder
from lmwright.data.rows.store import TokenStore
from lmwright.storage.bucket import Bucket
from lmwright.storage.claim import CLAIM
from lmwright.train.session import train
from tests.flipped import flipped
from tests.storage.fake_gcs import Faults
from tests.storage.test_runs import losses


@pytest.fixture
def pushed(small_run, url, capsys):
    assert main(["data", "push", small_run.data.dir, url]) == 0
    assert f"in {url}" in capsys.readouterr().out
    return url


def wait_for_copies(count):
    for _ in range(200):
        copies = [p for p in cache_folder().glob("*") if not p.name.startswith(".")]
        if len(copies) >= count:
            return copies
        time.sleep(0.05)
    raise AssertionError(f"{len(copies)} copies instead of {count}")


def batches(store, count=6):
    return [store.batch(k * 4, k * 4 + 4)["tokens"] for k in range(count)]


def test_pushed_data_is_whole_and_is_not_sent_twice(pushed, small_run, capsys):
    assert main(["data", "verify", pushed]) == 0
    assert main(["data", "push", small_run.data.dir, pushed]) == 0
    sent = [
        line.split()[-2] for line in capsys.readouterr().out.splitlines() if line.endswith("sent")
    ]
    assert len(sent) == 5 and set(sent) == {"0"}


def test_another_store_in_its_place_leaves_no_markers_of_the_first(pushed, small_run, tmp_path):
    other = replace(small_run.data, dir=str(tmp_path / "other"), shuffle=Shuffle(seed=3))
    Bucket(pushed).write("shuffle/parts/part-00000.json", "{}")  # as `prepare` in a bucket does
    prepare(other, small_run.model.seq_len)
    assert main(["data", "push", other.dir, pushed]) == 0
    assert not Bucket(pushed).entries("shuffle/parts")
    assert main(["data", "verify", pushed]) == 0


def test_a_damaged_file_is_not_pushed(small_run, url, tmp_path, capsys):
    import shutil

    copy = shutil.copytree(small_run.data.dir, tmp_path / "data")
    shard = next(Path(copy).glob("pack/train/*/shard-*.bin"))
    shard.write_bytes(flipped(shard.read_bytes()))
    assert main(["data", "push", str(copy), url]) == 2
    assert f"{shard} was altered" in capsys.readouterr().err
    shard.unlink()
    os.mkfifo(shard)  # who opens it waits until somebody writes there
    assert main(["data", "push", str(copy), url]) == 2
    assert f"{shard} was altered: it is no file" in capsys.readouterr().err
    assert "pack/manifest.json" not in Bucket(url).entries()


def test_rows_are_those_of_the_disk_before_and_after_they_are_copied(pushed, small_run):
    local = batches(TokenStore.open(small_run.data.dir))
    store = TokenStore.open(pushed, cache_gib=1.0)
    np.testing.assert_array_equal(batches(store), local)
    copies = wait_for_copies(2)  # of train and eval
    again = TokenStore.open(pushed, cache_gib=1.0)
    asked = []
    again.place.fs.cat_ranges, before = lambda *a, **k: asked.append(a), again.place.fs.cat_ranges
    try:
        np.testing.assert_array_equal(batches(again), local)
    finally:
        again.place.fs.cat_ranges = before
    assert not asked, "a copied shard is read from the disk"
    copies[0].write_bytes(b"short")  # half a copy is none
    np.testing.assert_array_equal(batches(TokenStore.open(pushed, cache_gib=1.0)), local)


def test_a_fetched_tokenizer_outlives_its_store(pushed):
    folder = Path(TokenStore.open(pushed).tokenizer_dir)
    gc.collect()
    assert (folder / "tokenizer.json").exists()


def test_copies_stay_below_their_limit(pushed):
    packed = TokenStore.open(pushed).packed
    largest = max(entry["bytes"] for entry in packed.files.values())
    place = CachedPlace(pushed, largest)  # room for one
    place.expect(packed, list(packed.files))
    for name in packed.files:
        place._fetch(f"pack/{name}")
        total = sum(p.stat().st_size for p in cache_folder().glob("*"))
        assert total <= largest


def test_a_run_on_pushed_data_is_the_same(pushed, small_run, url):
    run = replace(small_run, dir=f"{url}-run", data=replace(small_run.data, dir=pushed))
    train(run, jax.devices()[:1])
    whole = replace(run, dir=f"{url}-disk", data=small_run.data)
    train(whole, jax.devices()[:1])
    assert losses(run.dir) == losses(whole.dir)


@pytest.mark.slow
def test_a_push_under_faults_arrives(proxy, small_run, url, capsys):
    proxy.faults = Faults(0.2, seed=1)
    assert main(["data", "push", small_run.data.dir, url]) == 0
    proxy.faults = Faults()
    assert main(["data", "verify", url]) == 0


KILL = """
    import os, threading
    import lmwright.data.carry as carry
    carry.EVERY_S = 0.3
    threading.Timer({seconds}, lambda: os._exit(9)).start()
    from lmwright.cli.main import main
    raise SystemExit(main(["prepare", {file!r}]))
"""


def manifests(bucket):
    names = [name for name in bucket.entries() if name.endswith("manifest.json")]
    return {name: bucket.read(name)[0] for name in names}


@pytest.mark.slow
def test_prepare_writes_to_a_bucket_and_goes_on_from_another_machine(
    small_run, url, tmp_path, monkeypatch, capsys
):
    from tests.resume.small_runs import environment

    run = replace(small_run, data=replace(small_run.data, dir=url))
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(run))
    for seconds in (4, 6):  # killed somewhere, each time on another machine
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine{seconds}"))
        code = textwrap.dedent(KILL.format(seconds=seconds, file=str(file)))
        subprocess.run([sys.executable, "-c", code], env=environment(), timeout=120)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    assert main(["prepare", str(file)]) == 0
    assert f"in {url}: " in capsys.readouterr().out
    for name, manifest in manifests(Bucket(url)).items():
        assert manifest == (Path(small_run.data.dir) / name).read_bytes()
    assert main(["data", "verify", url]) == 0
    assert CLAIM not in Bucket(url).entries()
    capsys.readouterr()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "last"))
    assert main(["prepare", str(file)]) == 0
    assert "up to date" in capsys.readouterr().out
    other = dump_toml(replace(run, data=replace(run.data, shuffle=Shuffle(seed=3))))
    file.write_text(other)
    assert main(["prepare", str(file)]) == 0
    assert main(["data", "verify", url]) == 0


def test_stages_that_were_dropped_leave_the_bucket(small_run, url, tmp_path, monkeypatch, capsys):
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(replace(small_run, data=replace(small_run.data, dir=url))))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    assert main(["prepare", str(file)]) == 0
    assert any(name.endswith(".parquet") for name in Bucket(url).entries())
    assert main(["prepare", str(file), "--keep", "store"]) == 0
    held = {
        name for name in Bucket(url).entries() if name.split("/")[0] in ("normalize", "tokenize")
    }
    assert {name.rpartition("/")[2] for name in held} <= {
        "stage.json", "dropped.json", "quarantine.jsonl",
    }  # fmt: skip
    assert main(["data", "verify", url]) == 0
    capsys.readouterr()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert main(["prepare", str(file)]) == 0
    assert "up to date" in capsys.readouterr().out
    for name, manifest in manifests(Bucket(url)).items():
        assert manifest == (Path(small_run.data.dir) / name).read_bytes()
