"""Shards whose bits flipped after they were written: training stops and names the file."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from lmwright.data.rows.loader import Loader
from lmwright.data.rows.record import row_dtype
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from tests.data.user_run import command

T = 32


@pytest.fixture
def inside(clean, tmp_path, monkeypatch):
    shutil.copytree(clean, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def change(path, field, value):
    """Sets one field in every row of a shard."""
    rows = np.fromfile(path, row_dtype(T, "uint16"))
    rows[field] = value(rows[field])
    rows.tofile(path)


TRAIN, EVAL = "data/pack/train/words/shard-00000.bin", "data/pack/eval/words/shard-00000.bin"
DAMAGE = {
    "ids above the vocabulary": (TRAIN, "tokens", lambda t: t | 0x4000),
    "ids that are other words": (TRAIN, "tokens", lambda t: t ^ 1),
    "documents that begin elsewhere": (TRAIN, "starts", lambda s: s ^ 0x10),
    "lengths beyond the row": (TRAIN, "length", lambda n: n | 1 << 20),
    "bytes of held-out text": (EVAL, "text_bytes", lambda n: n + 1),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_train_stops_on_flipped_bits_and_names_the_shard(kind, inside, capsys):
    path, field, value = DAMAGE[kind]
    change(path, field, value)
    code, said = command(capsys, "train", "run.toml")
    assert code == 2
    assert path in said and "was altered" in said and "delete this file" in said
    assert not list(Path("run/checkpoints").glob("[0-9]*"))
    Path(path).unlink()  # the cure that it names
    assert command(capsys, "prepare", "run.toml")[0] == 0
    assert command(capsys, "data", "verify", "data")[0] == 0


def test_the_cured_store_trains(inside, capsys):
    change(TRAIN, "tokens", lambda t: t ^ 1)
    Path(TRAIN).unlink()
    assert command(capsys, "prepare", "run.toml")[0] == 0
    assert command(capsys, "train", "run.toml")[0] == 0


def test_written_epochs_are_watched_too(inside, capsys):
    assert command(capsys, "prepare", "run.toml", "data.shuffle.order=written")[0] == 0
    path = "data/shuffle/epoch-00000/shard-00000.bin"
    change(path, "tokens", lambda t: t ^ 1)
    code, said = command(capsys, "train", "run.toml", "data.shuffle.order=written")
    assert code == 2 and f"{path} was altered" in said


@pytest.mark.parametrize("path", [TRAIN, EVAL])
def test_hosts_share_the_files_and_one_of_them_finds_it(path, inside):
    change(path, "tokens", lambda t: t ^ 1)
    store = TokenStore.open("data")
    found = []
    for host in range(2):
        with Loader(store, 2, host=(host, 2)) as loader:
            deadline = time.monotonic() + 20
            while loader._watch._thread.is_alive() and time.monotonic() < deadline:
                time.sleep(0.01)
            try:
                loader.batch(0)
            except UserError as e:
                found.append(str(e))
    assert len(found) == 1 and path in found[0]


@pytest.mark.parametrize("stage, ending", [("normalize", ".parquet"), ("tokenize", ".docs.npy")])
def test_stages_between_are_not_read_where_their_bits_flipped(inside, capsys, stage, ending):
    """What is made of them would have hashes of its own, and pass every later check."""
    path = next(Path("data", stage).rglob(f"*{ending}"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    for name in ("tokenize", "pack") if stage == "normalize" else ("pack",):
        shutil.rmtree(Path("data", name))
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 2 and f"{path} was altered" in said and "delete this file" in said
    path.unlink()  # the cure that it names
    assert command(capsys, "prepare", "run.toml")[0] == 0
    assert command(capsys, "data", "verify", "data")[0] == 0


def test_stages_that_do_not_go_together_are_not_used(inside, capsys):
    """As where `prepare` is killed: later stages are still those of before."""
    words = "data.tokenizer.vocab_size=290", "model.vocab_size=290"
    assert command(capsys, "prepare", "run.toml", *words, "--stage", "tokenizer")[0] == 0
    code, said = command(capsys, "data", "verify", "data")
    assert code == 2 and "data/tokenize was made with another tokenizer than data/tok" in said
    with pytest.raises(UserError, match="data/pack was made with another tokenizer than data/tok"):
        TokenStore.open("data")
    assert command(capsys, "prepare", "run.toml", *words)[0] == 0
    assert command(capsys, "train", "run.toml", *words)[0] == 0

    Path("words.jsonl").write_text(Path("words.jsonl").read_text() + '{"text": "more of it"}\n')
    assert command(capsys, "prepare", "run.toml", *words, "--stage", "normalize")[0] == 0
    code, said = command(capsys, "train", "run.toml", *words, "dir=other")
    assert code == 2 and "in data, normalize is newer than tokenizer; run `lmwright" in said
    code, said = command(capsys, "data", "verify", "data")
    assert code == 2 and "data/tokenizer was not made of what data/normalize holds" in said

    Path("data/normalize/manifest.json").unlink()
    code, said = command(capsys, "train", "run.toml", *words, "dir=other")
    assert code == 2 and "in data, normalize was interrupted; run `lmwright prepare" in said
    assert command(capsys, "prepare", "run.toml", *words)[0] == 0
    assert command(capsys, "train", "run.toml", *words, "dir=other")[0] == 0
