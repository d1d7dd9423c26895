"""Portions in a bucket: one machine prepares them there while another trains."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from lmwright.cli.main import main
from lmwright.cloud.filler import Report, _copy
from lmwright.cloud.store_check import check_stores
from lmwright.config.load import dump_toml
from lmwright.config.run import Checkpoint, Eval, Metrics, Train
from lmwright.data import prepare_portions as module
from lmwright.data.portions import PORTIONS, folder_of, parse_portions
from lmwright.data.prepare import prepare
from lmwright.data.rows.store import TokenStore
from lmwright.data.stored import read_stored
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from lmwright.train import portions
from lmwright.train.session import train
from tests.data.portioned import COUNT, T, data_of, write_corpus
from tests.resume.small_runs import losses


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "data"
    prepare(data_of(corpus, folder), T)
    return folder


def listed(place):
    return len(parse_portions(Bucket(place).read(PORTIONS)[0], place).finished)


def test_one_machine_prepares_and_another_trains(
    corpus, whole, small_run, url, tmp_path, monkeypatch
):
    data = data_of(corpus, f"{url}/data")
    machine = iter(str(tmp_path / f"machine{number}") for number in range(COUNT))

    class Killed(BaseException):
        pass

    def prepare_one_more():
        """On another machine each time."""
        write = module._write

        def write_and_die(*arguments):
            write(*arguments)
            raise Killed

        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", next(machine))
            patch.setattr(module, "_write", write_and_die)
            with pytest.raises(Killed):
                prepare(data, T)

    prepare_one_more()
    assert listed(f"{url}/data") == 1
    run = replace(
        small_run,
        dir=str(tmp_path / "run"),
        data=replace(data, cache_gib=1.0),
        train=Train(steps=20, global_batch_size=5, precision="fp32"),
        eval=Eval(max_rows=4),
        checkpoint=Checkpoint(),
        metrics=Metrics(log_every_steps=1, trackers=()),
    )
    check_stores(run)
    own = SimpleNamespace(sleep=lambda _: prepare_one_more(), monotonic=lambda: 0.0)
    monkeypatch.setattr(portions, "time", own)
    assert train(run, jax.devices()[:1]).exit_code == 0
    assert listed(f"{url}/data") == COUNT
    with pytest.raises(StopIteration):
        next(machine)
    at_once = replace(run, dir=str(tmp_path / "at-once"), data=replace(run.data, dir=str(whole)))
    assert train(at_once, jax.devices()[:1]).exit_code == 0
    assert losses(run) == losses(at_once)
    assert main(["data", "verify", f"{url}/data"]) == 0


def test_a_push_copies_what_is_finished_and_more_later(corpus, whole, url, tmp_path, capsys):
    folder = tmp_path / "data"
    for number in range(2):
        shutil.copytree(whole / folder_of(number), folder / folder_of(number))
    told = parse_portions((whole / PORTIONS).read_bytes(), "")
    (folder / PORTIONS).write_bytes(replace(told, finished=told.finished[:2]).to_json())
    assert main(["data", "push", str(folder), url]) == 0
    assert listed(url) == 2
    store = TokenStore.open(url)
    assert not store.there(store.epoch_rows)
    with pytest.raises(UserError, match="2 of 3 portions are finished, and what is stored"):
        read_stored(url)
    assert main(["data", "push", str(whole), url]) == 0
    sent = [line.split()[-2] for line in capsys.readouterr().out.splitlines() if "sent" in line]
    assert sent[10:20] == ["0"] * 10
    assert store.there(store.epoch_rows)  # the one that was opened before sees it
    rows = TokenStore.open(whole).records(0, store.epoch_rows)
    assert (store.records(0, store.epoch_rows) == rows).all()
    (tmp_path / "disk").mkdir()
    report = Report(Bucket(f"{url}-report"), "disk.json", {})
    _copy(read_stored(url), tmp_path / "disk", report)
    assert (TokenStore.open(tmp_path / "disk").records(0, store.epoch_rows) == rows).all()


def test_the_command_prints_each_portion(corpus, small_run, url, tmp_path, capsys):
    run = replace(small_run, data=data_of(corpus, f"{url}/data"), dir=str(tmp_path / "run"))
    file = Path(tmp_path / "run.toml")
    file.write_text(dump_toml(run))
    assert main(["prepare", str(file), "--keep", "store"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"portion 3 of 3: 49 rows in {url}/data/portion-002" in out
    assert f"in {url}/data: 3 portions" in out
    assert main(["prepare", str(file)]) == 0
    assert "up to date: 3 portions" in " ".join(capsys.readouterr().out.split())
