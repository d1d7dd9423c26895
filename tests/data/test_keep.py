"""`prepare --keep store`: stages are dropped as they are used up, and made again when needed."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lmwright.cli.main import main
from lmwright.cli.shared import load
from lmwright.data import dropped
from lmwright.data import prepare as prepare_module
from lmwright.data import stage as stage_module
from lmwright.data.manifest import files_below, hash_file
from lmwright.data.room import room_of
from lmwright.data.rows.store import TokenStore
from tests.data.user_run import command, write_run

STORE = ("tokenizer", "pack", "shuffle")


def contents(folder, stages=STORE):
    files = (path for stage in stages for path in files_below(Path(folder) / stage))
    return {str(p.relative_to(folder)): hash_file(p) for p in files if p.name != ".lock"}


def stored_bytes(folder):
    return sum(path.stat().st_size for path in files_below(Path(folder)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a run, and its data with every stage."""
    folder = tmp_path_factory.mktemp("whole")
    write_run(folder, count=3000)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["prepare", "run.toml"]) == 0
    return folder


@pytest.fixture
def here(whole, tmp_path, monkeypatch):
    """A folder with the run, and none of its data."""
    monkeypatch.chdir(tmp_path)
    for name in ("run.toml", "words.jsonl"):
        shutil.copy2(whole / name, name)
    return tmp_path


def made_stages(monkeypatch):
    """Names of the stages of which parts are made."""
    made, original = [], stage_module._run_part

    def run_part(folder, *rest):
        made.append(folder.name)
        return original(folder, *rest)

    monkeypatch.setattr(stage_module, "_run_part", run_part)
    return made


def test_the_store_is_the_same_and_the_peak_was_said(whole, here, capsys, monkeypatch):
    peaks, drop = [], dropped.drop

    def measured(folder):
        peaks.append(stored_bytes("data"))
        drop(folder)

    monkeypatch.setattr(prepare_module, "drop", measured)
    code, said = command(capsys, "prepare", "run.toml", "--keep", "store")
    assert code == 0, said
    assert contents("data") == contents(whole / "data")
    for stage in ("normalize", "tokenize"):
        left = {p.name for p in (here / "data" / stage).iterdir()}
        assert left <= {"stage.json", "dropped.json", ".lock", "quarantine.jsonl"}
    assert len(TokenStore.open("data").batch(0, 8)["tokens"]) == 8
    found = re.match(r"disk: up to ([\d.]+) GB at once and ([\d.]+) GB in the end", said)
    assert said.index("disk:") < said.index("normalize:")
    # at least what was there, in hundredths, and far from all that a disk has
    peak_bytes, store_bytes = (float(figure) * 1e9 for figure in found.groups())
    assert max(peaks) <= peak_bytes + 0.005e9 and peak_bytes < 0.05e9
    assert stored_bytes("data") <= store_bytes + 0.005e9

    made = made_stages(monkeypatch)
    for keep in ("store", "all"):
        code, said = command(capsys, "prepare", "run.toml", "--keep", keep)
        assert code == 0 and "up to date" in said and not made
    assert command(capsys, "data", "verify", "data")[0] == 0


def test_the_room_is_above_what_stages_take(whole, monkeypatch):
    monkeypatch.chdir(whole)
    room = room_of(load("run.toml", ()))
    for stage in ("normalize", "tokenize", "pack"):
        took = sum(
            path.stat().st_size
            for path in files_below(whole / "data" / stage)
            if path.suffix in (".parquet", ".bin", ".npy")
        )
        assert took <= getattr(room, stage) <= 6 * took, stage


def test_the_room_of_a_sample_is_that_of_its_tokens(whole, monkeypatch):
    monkeypatch.chdir(whole)
    run = load("run.toml", ())
    source = replace(run.data.sources[0], sample_tokens=1000)
    sample = room_of(replace(run, data=replace(run.data, sources=(source,))))
    assert 2 * 1000 <= sample.tokenize <= 2.5 * 1000 < room_of(run).tokenize / 20


@pytest.mark.parametrize("at", ["drop", "pack", "remove"])
def test_a_kill_in_between_goes_on(whole, here, capsys, monkeypatch, at):
    def killed(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if at == "drop":
            patch.setattr(prepare_module, "drop", killed)
        elif at == "remove":
            patch.setattr(dropped.shutil, "rmtree", killed)
        else:
            patch.setattr("lmwright.data.rows.pack.run_stage", killed)
        assert command(capsys, "prepare", "run.toml", "--keep", "store")[0] != 0
    assert not Path("data/pack/manifest.json").exists()
    code, said = command(capsys, "prepare", "run.toml", "--keep", "store")
    assert code == 0, said
    assert "made again" not in said
    assert contents("data") == contents(whole / "data")
    assert not list(Path("data/normalize").glob("*.parquet"))


def test_what_a_change_needs_is_made_again(here, capsys, monkeypatch):
    assert command(capsys, "prepare", "run.toml", "--keep", "store")[0] == 0
    made = made_stages(monkeypatch)
    code, said = command(capsys, "prepare", "run.toml", "data.shuffle.seed=1")
    assert code == 0 and "made again" not in said and not made

    shorter = "data.pack.seq_len=16"
    code, said = command(capsys, "prepare", "run.toml", shorter, "--stage", "pack")
    assert code == 2 and "data/tokenize: this stage was dropped by `prepare --keep store`" in said
    code, said = command(capsys, "prepare", "run.toml", shorter)
    assert code == 0 and set(made) == {"read", "normalize", "tokenize", "pack"}
    for stage in ("tokenize", "normalize"):
        assert f"data/{stage} was dropped by --keep store and is needed: it is made again" in said
    assert list(Path("data/normalize").glob("*.parquet"))
    fresh = command(capsys, "prepare", "run.toml", shorter, "data.dir=fresh")
    assert fresh[0] == 0 and contents("data") == contents("fresh")
