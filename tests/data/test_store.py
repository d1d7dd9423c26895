"""The store: batches equal what the files say; damage is found and named; URLs work."""

import functools
import http.server
import logging
import os
import shutil
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest

from lmwright.config.run import Shuffle
from lmwright.data.rows import shards
from lmwright.data.rows.order import Order
from lmwright.data.rows.record import unpack_rows
from lmwright.data.rows.shuffle import shuffle_rows
from lmwright.data.rows.store import TokenStore, verify_store
from lmwright.errors import UserError
from lmwright.storage.patience import url_filesystem
from tests.data.small_store import WEIGHTS, T, pack, prepared, same, source_records
from tests.data.token_stage import random_documents, tokenize_stage


@pytest.fixture(scope="module")
def virtual(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("virtual"), weights=WEIGHTS)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("written"), "written", WEIGHTS)


def test_batches_follow_the_order(virtual):
    store = TokenStore.open(virtual)
    rows = source_records(virtual, T)
    order = Order([len(r) for r in rows.values()], list(WEIGHTS.values()), 3, 40)
    start = order.epoch_rows - 7
    sources, numbers = order.rows(start, start + 16)
    tables = list(rows.values())
    records = np.stack([tables[s][r] for s, r in zip(sources, numbers, strict=True)])
    same(store.batch(start, start + 16), unpack_rows(records))
    assert store.epoch_rows == order.epoch_rows and store.sources == ("books", "web/news")


def test_written_equals_virtual_and_goes_on_after_its_epochs(virtual, written):
    a, b = TokenStore.open(virtual), TokenStore.open(written)
    end = 2 * a.epoch_rows
    for start in (0, 37, a.epoch_rows - 5, end - 5, end, 3 * a.epoch_rows - 2):
        same(a.batch(start, start + 11), b.batch(start, start + 11))


def test_each_order_of_rows_has_its_own_fingerprint(tmp_path, virtual, written):
    """A run that resumes knows by it that steps get the rows that they would have got."""
    assert TokenStore.open(written).fingerprint == TokenStore.open(virtual).fingerprint
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copytree(virtual / "pack", folder / "pack")
    known = {TokenStore.open(virtual).fingerprint}
    own = {"order": "virtual", "block_rows": 40, "seed": 3}
    changes = [
        ({"seed": 4}, WEIGHTS),
        ({"block_rows": 41}, WEIGHTS),
        ({}, None),
        ({}, WEIGHTS | {"books": 1.5}),
        ({"order": "none"}, None),
    ]
    for number, (change, weights) in enumerate(changes, start=2):
        shuffle_rows(folder, Shuffle(**own | change), weights, workers=1)
        known.add(TokenStore.open(folder).fingerprint)
        assert len(known) == number, change
    shuffle_rows(folder, Shuffle(**own), WEIGHTS, workers=1)
    assert TokenStore.open(folder).fingerprint == TokenStore.open(virtual).fingerprint


def test_written_epochs_stand_without_the_packed_train_rows(written, tmp_path):
    shutil.copytree(written, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "pack" / "train")
    store = TokenStore.open(tmp_path / "copy" / "shuffle")
    whole = TokenStore.open(written)
    last = 2 * whole.epoch_rows
    same(store.batch(last - 8, last), whole.batch(last - 8, last))
    store.check_rows(last)
    for read in (store.check_rows, lambda stop: store.batch(stop - 8, stop)):  # before and in a run
        with pytest.raises(UserError, match=r"pack/train/books/shard-00000.bin is missing"):
            read(last + 4)


def test_attention_over_the_row(tmp_path, virtual):
    store = TokenStore.open(prepared(tmp_path, weights=WEIGHTS, attention="row"))
    batch, cut = store.batch(0, 20), TokenStore.open(virtual).batch(0, 20)
    np.testing.assert_array_equal(batch["tokens"], cut["tokens"])
    assert set(np.unique(batch["segment_ids"])) == {0, 1}
    real = batch["segment_ids"] > 0
    np.testing.assert_array_equal(real, cut["segment_ids"] > 0)
    np.testing.assert_array_equal(batch["positions"], np.where(real, np.arange(T), 0))
    np.testing.assert_array_equal(batch["loss_weight"], real & (np.arange(T) > 0))


def test_eval_rows_come_in_their_order_with_their_bytes(virtual):
    store = TokenStore.open(virtual)
    assert store.eval_sources == ("books",)
    records = source_records(virtual, T, "eval")["books"]
    assert store.eval_rows("books") == len(records)
    batches = list(store.eval_batches("books", 8))
    assert {b["tokens"].shape for b in batches} == {(8, T)}
    joined = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    n = len(records)
    same({k: v[:n] for k, v in joined.items() if k != "text_bytes"}, unpack_rows(records))
    # this store has no tokenizer: bytes in proportion to the tokens that are predicted
    share = joined["loss_weight"][:n].sum(axis=1) / records["length"]
    expected = np.rint(records["text_bytes"] * share)
    np.testing.assert_array_equal(joined["text_bytes"][:n], expected)
    assert not joined["segment_ids"][n:].any() and not joined["text_bytes"][n:].any()
    assert not joined["loss_weight"][n:].any() and len(joined["tokens"]) % 8 == 0


def test_some_eval_rows_are_spread_over_the_source(virtual):
    store = TokenStore.open(virtual)
    records = source_records(virtual, T, "eval")["books"]
    some = [b["tokens"] for b in store.eval_batches("books", 3, max_rows=5)]
    assert [len(rows) for rows in some] == [3, 3]
    found = np.concatenate(some)[:5]
    numbers = [np.flatnonzero((records["tokens"] == row).all(axis=1))[0] for row in found]
    gaps = np.diff([-1, *numbers, len(records)])
    assert gaps.min() >= len(records) // 5 // 2 and gaps.max() <= len(records) // 5 + 1
    again = [b["tokens"] for b in TokenStore.open(virtual).eval_batches("books", 3, max_rows=5)]
    np.testing.assert_array_equal(some, again)


def test_a_shard_without_rights_is_found_at_open(virtual, monkeypatch):
    def refused(path, mode):
        if str(path).endswith("train/books/shard-00001.bin"):
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, mode)

    monkeypatch.setattr(shards, "open", refused, raising=False)
    with pytest.raises(PermissionError, match=r"pack/train/books/shard-00001\.bin"):
        TokenStore.open(virtual)


@pytest.mark.parametrize("order", ["virtual", "written"])
def test_cut_shard_is_named_at_open(order, tmp_path, request):
    folder = shutil.copytree(request.getfixturevalue(order), tmp_path / "s")
    stage = "shuffle/epoch-00001" if order == "written" else "pack/train/web/news"
    shard = folder / stage / "shard-00001.bin"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(UserError, match=f"{stage}/shard-00001.bin has .* bytes instead of"):
        TokenStore.open(folder)
    shard.unlink()
    with pytest.raises(UserError, match=f"{stage}/shard-00001.bin is missing"):
        TokenStore.open(folder)
    with pytest.raises(UserError, match=f"{stage}/shard-00001.bin is missing"):
        verify_store(folder)


def test_altered_shard_is_named(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "s")
    names = [v.stage for v in verify_store(folder)]
    assert names == ["tokenize", "pack", "shuffle"]
    TokenStore.open(folder, verify="hashes")
    with open(folder / "shuffle/epoch-00000/shard-00002.bin", "r+b") as f:
        f.seek(1000)
        byte = f.read(1)[0]
        f.seek(1000)
        f.write(bytes([byte ^ 4]))
    TokenStore.open(folder)
    for check in (verify_store, functools.partial(TokenStore.open, verify="hashes")):
        with pytest.raises(UserError, match=r"shuffle/epoch-00000/shard-00002.bin was altered"):
            check(folder)


def test_damaged_or_foreign_manifests(virtual, tmp_path):
    folder = shutil.copytree(virtual, tmp_path / "s")
    manifest = folder / "pack" / "manifest.json"
    raw = manifest.read_text()
    manifest.write_text(raw[: len(raw) // 2])
    with pytest.raises(UserError, match=r"pack/manifest\.json is damaged"):
        TokenStore.open(folder)
    manifest.write_text(raw.replace('"rows"', '"rows" '))
    with pytest.raises(UserError, match=r"shuffle was not made of what .*pack holds"):
        TokenStore.open(folder)
    shutil.rmtree(folder / "shuffle")
    with pytest.raises(UserError, match="shuffle: this stage has not been made"):
        TokenStore.open(folder)
    with pytest.raises(UserError, match="holds no finished stage"):
        verify_store(tmp_path / "nowhere")


def test_a_relative_folder_that_is_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"has not been made in {tmp_path}; .*folder where it is$"):
        TokenStore.open("data/mine")
    (tmp_path / "data" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match=r"has not been made; run `lmwright prepare` to make it$"):
        TokenStore.open("data/mine")


@pytest.mark.parametrize(("given", "shown"), [(logging.NOTSET, False), (logging.DEBUG, True)])
def test_gcsfs_logs_no_error_that_it_raises_too(given, shown):
    logger = logging.getLogger("gcsfs")
    level = logger.level
    try:
        logger.setLevel(given)
        url_filesystem("memory://bucket")
        assert logger.isEnabledFor(logging.ERROR) is shown
    finally:
        logger.setLevel(level)


def test_a_batch_has_at_most_the_rows_of_an_epoch(virtual):
    store = TokenStore.open(virtual)
    store.check_batch(store.epoch_rows)
    with pytest.raises(UserError, match="use a smaller batch"):
        store.check_batch(store.epoch_rows + 1)


@pytest.fixture
def memory_url(written):
    fs = fsspec.filesystem("memory")
    fs.put(str(written), "/bucket/data", recursive=True)
    yield "memory://bucket/data"
    fs.rm("/bucket", recursive=True)


def test_fsspec_url_gives_the_same_batches(written, memory_url):
    store, local = TokenStore.open(memory_url, verify="hashes"), TokenStore.open(written)
    for start in (0, 2 * store.epoch_rows - 5, 3 * store.epoch_rows):
        same(store.batch(start, start + 11), local.batch(start, start + 11))
    same(next(store.eval_batches("books", 9)), next(local.eval_batches("books", 9)))
    assert len(verify_store(memory_url)) == 3
    fs = fsspec.filesystem("memory")
    name = "/bucket/data/shuffle/epoch-00000/shard-00001.bin"
    fs.pipe(name, fs.cat(name)[:-3])
    with pytest.raises(
        UserError, match=r"memory://bucket/data/shuffle/epoch-00000/shard-00001.bin"
    ):
        TokenStore.open(memory_url)
    with pytest.raises(UserError, match=r"memory://bucket/none/pack: there is no manifest.json"):
        TokenStore.open("memory://bucket/none")
    with pytest.raises(UserError, match="nosuch://x: this kind of URL"):
        TokenStore.open("nosuch://x")


def test_tokenizer_folder(written, memory_url, tmp_path):
    with pytest.raises(UserError, match="tokenizer is missing"):
        _ = TokenStore.open(written).tokenizer_dir
    fsspec.filesystem("memory").pipe("/bucket/data/tokenizer/tokenizer.json", b"{}")
    store = TokenStore.open(memory_url)
    assert (Path(store.tokenizer_dir) / "tokenizer.json").read_bytes() == b"{}"
    folder = shutil.copytree(written, tmp_path / "s")
    (folder / "tokenizer").mkdir()
    assert TokenStore.open(folder).tokenizer_dir == str(folder / "tokenizer")


class RangeHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder with byte ranges, as object stores do; counts the bytes sent."""

    sent = 0

    def do_GET(self):
        path = self.translate_path(self.path)
        wanted = self.headers.get("Range")
        if not wanted or not os.path.isfile(path):
            return super().do_GET()
        size = os.path.getsize(path)
        a, b = wanted.removeprefix("bytes=").split("-")
        a, b = int(a), min(int(b or size - 1), size - 1)
        with open(path, "rb") as f:
            f.seek(a)
            body = f.read(b - a + 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {a}-{b}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        type(self).sent += len(body)

    def log_message(self, *args):
        pass


def test_http_reads_only_the_ranges_it_needs(written):
    pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")
    handler = functools.partial(RangeHandler, directory=str(written))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        store = TokenStore.open(f"http://127.0.0.1:{server.server_port}")
        RangeHandler.sent = 0
        same(store.batch(5, 16), TokenStore.open(written).batch(5, 16))
        assert RangeHandler.sent == 11 * store.dtype.itemsize
        server.shutdown()


def test_wide_ids(tmp_path):
    rng = np.random.default_rng(1)
    docs = random_documents(rng, 40, 60)
    for name, dtype in (("a", "uint16"), ("b", "uint32")):
        tokenize_stage(tmp_path / name, [{("train", "s"): docs}], dtype)
        pack(tmp_path / name, 24)
        shuffle_rows(tmp_path / name, Shuffle())
    a, b = (TokenStore.open(tmp_path / n).batch(0, 20) for n in "ab")
    same(a, b)
