"""Every file of a prepared store and every kind of input, damaged: one sentence or no effect."""

import contextlib
import gzip
import io
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lmwright.cli.main import main
from lmwright.config.run import Source
from lmwright.data.rows.loader import Loader
from lmwright.data.rows.store import TokenStore, verify_store
from lmwright.data.sources.files import cut_parts, find_files
from lmwright.data.sources.read import read_rows
from lmwright.errors import UserError
from tests.data.user_run import texts, write_run
from tests.time_limit import time_limit

LIMIT_S = 60


def quiet(call):
    """The message of a UserError that a call raises, None if it raises none; all else is raised."""
    try:
        with time_limit(LIMIT_S), contextlib.redirect_stderr(io.StringIO()):
            call()
    except UserError as e:
        assert "\n" not in str(e) and len(str(e)) < 2000
        return str(e)
    return None


def mutate(raw, rng):
    """Other bytes: flipped, cut, doubled, overwritten, or JSON with one value of another type."""
    kind = rng.choice(["flip", "flips", "cut", "double", "noise", "json", "json", "json"])
    if kind == "json":
        with contextlib.suppress(ValueError):
            return json.dumps(odd(json.loads(raw), rng)).encode()
        kind = "flips"
    new = bytearray(raw) or bytearray(b"\0")
    at = rng.randrange(len(new))
    if kind.startswith("flip"):
        for _ in range(1 if kind == "flip" else rng.randint(2, 30)):
            new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del new[at:]
    elif kind == "double":
        new += new[at:]
    else:
        size = min(len(new) - at, rng.randint(1, 64))
        new[at : at + size] = rng.randbytes(size)
    return bytes(new)


ODD = (None, -1, 0, 1.5, 10**30, True, "", "../../x", "\0", [], {}, [[]], {"a": None}, float("nan"))


def odd(tree, rng):
    """The same JSON with one value, somewhere, replaced or removed."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(sorted(tree))
        if rng.random() < 0.15:
            return {k: v for k, v in tree.items() if k != key}
        return tree | {key: odd(tree[key], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        at = rng.randrange(len(tree))
        return [*tree[:at], odd(tree[at], rng), *tree[at + 1 :]]
    return rng.choice(ODD)


def batches(folder):
    """All that training and evaluation read of a store, hashes compared as they do."""
    store = TokenStore.open(folder)
    with Loader(store, 8) as loader:
        loader._watch._thread.join()
        found = [loader.batch(k) for k in range(2 * store.epoch_rows // 8)]
    return found + [b for s in store.eval_sources for b in store.eval_batches(s, 8)]


def equal(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x)
        for x, y in zip(a, b, strict=True)
    )


def damaged_stores(clean, tmp_path, count, seed):
    """Damages one file at a time; counts what was said, what had no effect."""
    rng = random.Random(seed)
    good = batches(clean / "data")
    shutil.copytree(clean, tmp_path / "here")
    said = same = 0
    files = sorted(p for p in (tmp_path / "here/data").rglob("*") if p.is_file())
    files = [p for p in files if p.name != ".lock" for _ in range(4 if p.suffix == ".json" else 1)]
    for path in [rng.choice(files) for _ in range(count)]:
        raw = path.read_bytes()
        path.write_bytes(mutate(raw, rng))
        place = path.relative_to(tmp_path)
        changed = path.read_bytes() != raw
        hashed = path.name not in ("stage.json",) and path.parent.name != "parts"
        try:
            message = quiet(lambda: verify_store(tmp_path / "here/data"))
            assert message or not changed or not hashed or path.suffix == ".json", place
            found = []
            message = quiet(lambda found=found: found.extend(batches(tmp_path / "here/data")))
            if message is None:
                assert equal(found, good), f"{place}: other batches"
        except Exception as e:
            e.add_note(f"{place}: {path.read_bytes()[:300]}")
            raise
        said, same = said + (message is not None), same + (message is None)
        path.write_bytes(raw)
    return said, same


def damaged_again(clean, tmp_path, monkeypatch, count, seed):
    """Damages a file that steers `prepare` and prepares again: the store is as it was."""
    rng = random.Random(seed)
    shutil.copytree(clean, tmp_path / "again")
    monkeypatch.chdir(tmp_path / "again")
    good = batches("data")
    files = sorted(p for p in Path("data").rglob("*.json") if p.parent.parent.name != "tokenizer")
    for path in [rng.choice(files) for _ in range(count)]:
        if path.parent.name == "tokenizer" and path.name not in ("stage.json", "manifest.json"):
            continue
        path.write_bytes(mutate(path.read_bytes(), rng))
        shown = path.read_bytes()[:300]
        with time_limit(LIMIT_S), contextlib.redirect_stderr(io.StringIO()):
            assert main(["prepare", "run.toml"]) == 0, (path, shown)
        assert equal(batches("data"), good), (path, shown)


def inputs(folder):
    """One file or folder of each kind, and its source."""
    rows = [{"text": t, "n": i} for i, t in enumerate(texts(20))]
    lines = "".join(json.dumps(r) + "\n" for r in rows).encode()
    cells = "text,n\n" + "".join(f'"{r["text"]}",{r["n"]}\n' for r in rows)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "d.csv").write_text(cells)
    (folder / "e.tsv").write_text(cells.replace(",", "\t").replace('"', ""))
    (folder / "f.json").write_text(json.dumps(rows))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "g.parquet")
    saved = folder / "h/train"
    saved.mkdir(parents=True)
    with pa.OSFile(str(saved / "x.arrow"), "wb") as f, pa.ipc.new_stream(f, table.schema) as w:
        w.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "x.arrow"}]}))
    (folder / "h/dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.csv", "e.tsv", "g.parquet"):
        yield folder / name, Source(path=str(folder / name))
    yield folder / "f.json", Source(path=str(folder / "f.json"), format="json")
    for name in ("dataset_dict.json", "train/state.json", "train/x.arrow"):
        yield folder / "h" / name, Source(path=str(folder / "h"))


def read_all(source):
    files = find_files(source)
    for slices in cut_parts(files, source, 1000):
        for piece in slices:
            yield from read_rows(piece, source)


def damaged_inputs(folder, count, seed):
    """Damages one input at a time; those whose format has a checksum never pass unseen."""
    rng = random.Random(seed)
    kinds = list(inputs(folder))
    for path, source in [rng.choice(kinds) for _ in range(count)]:
        raw = path.read_bytes()
        good = list(read_all(source))
        path.write_bytes(mutate(raw, rng))
        found = []
        try:
            message = quiet(lambda s=source, f=found: f.extend(read_all(s)))
        except Exception as e:
            e.add_note(f"{path.name}: {path.read_bytes()[:300]}")
            raise
        if path.suffix == ".gz" and message is None and len(path.read_bytes()) >= len(raw):
            assert found[: len(good)] == good, path
        path.write_bytes(raw)


def test_some_damage(clean, tmp_path, monkeypatch):
    said, same = damaged_stores(clean, tmp_path, 24, seed=1)
    assert said and said + same == 24
    (tmp_path / "in").mkdir()
    damaged_inputs(tmp_path / "in", 60, seed=2)
    damaged_again(clean, tmp_path, monkeypatch, 3, seed=3)


@pytest.mark.slow
def test_a_great_deal_of_damage(clean, tmp_path, monkeypatch):
    said, _ = damaged_stores(clean, tmp_path, 300, seed=4)
    assert said > 50
    (tmp_path / "in").mkdir()
    damaged_inputs(tmp_path / "in", 500, seed=5)
    damaged_again(clean, tmp_path, monkeypatch, 40, seed=6)


@pytest.mark.parametrize("name", ["a\0b", "a\x1b[31mb", "n" * 300, "..", "a/b", "\u200bx"])
def test_names_that_are_no_folders(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    quoted = json.dumps(name)
    for field in ("data.sources=[{path='words.jsonl', name=NAME}]", "data.dir=NAME", "dir=NAME"):
        if field[0] == "d" and name in ("..", "a/b") and "sources" not in field:
            continue
        assert main(["prepare", "run.toml", field.replace("NAME", quoted)]) == 2
        said = capsys.readouterr().err
        assert "cannot be a folder's" in said and "\x1b" not in said and "\0" not in said


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "sub/x.arrow", "a\0"])
def test_saved_datasets_name_files_of_their_folder_only(name, tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(UserError, match="it names files outside its folder"):
        find_files(Source(path=str(tmp_path)))
