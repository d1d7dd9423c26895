"""Written shards hold the virtual order; the stage notices what changed."""

import numpy as np
import pytest

from lmwright.config.run import Shuffle
from lmwright.data.manifest import files_below, hash_file
from lmwright.data.rows.order import Order
from lmwright.data.rows.shuffle import shuffle_rows
from lmwright.errors import UserError
from tests.data.small_store import WEIGHTS, corpus, pack, source_records
from tests.data.token_stage import random_documents, tokenize_stage


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_written_epochs_follow_the_order(tmp_path, weights):
    corpus(tmp_path)
    pack(tmp_path, 32, shard_tokens=1500)
    section = Shuffle(order="written", epochs=3, block_rows=50, seed=9)
    manifest = shuffle_rows(tmp_path, section, weights, workers=1, shard_tokens=2000)
    rows = source_records(tmp_path, 32)
    assert list(rows) == manifest.facts["sources"] == ["books", "web/news"]
    order = Order(
        [len(r) for r in rows.values()], weights and list(weights.values()), 9, block_rows=50
    )
    sources, numbers = order.rows(0, 3 * order.epoch_rows)
    tables = list(rows.values())
    expected = np.stack([tables[s][r] for s, r in zip(sources, numbers, strict=True)])
    files = sorted((tmp_path / "shuffle").glob("epoch-*/shard-*.bin"))
    assert {p.parent.name for p in files} == {"epoch-00000", "epoch-00001", "epoch-00002"}
    assert len(files) > 6 and max(p.stat().st_size for p in files) <= 62 * rows["books"].itemsize
    written = np.concatenate([np.fromfile(p, expected.dtype) for p in files])
    assert np.array_equal(written, expected)
    assert manifest.counts == {
        "rows": 3 * order.epoch_rows,
        "tokens": int(expected["length"].sum()),
    }


def test_same_bytes_for_any_worker_count(tmp_path):
    section = Shuffle(order="written", epochs=2, seed=1)
    for workers in (1, 2):
        corpus(tmp_path / str(workers))
        pack(tmp_path / str(workers), 64)
        shuffle_rows(tmp_path / str(workers), section, workers=workers, shard_tokens=2000)
    hashes = [
        {p.relative_to(tmp_path / n): hash_file(p) for p in files_below(tmp_path / n / "shuffle")}
        for n in "12"
    ]
    assert hashes[0] == hashes[1] and len(hashes[0]) > 10


def test_virtual_and_none_write_only_a_manifest(tmp_path):
    corpus(tmp_path)
    pack(tmp_path, 64)
    for order in ("virtual", "none"):
        manifest = shuffle_rows(tmp_path, Shuffle(order=order, epochs=3, seed=4))
        assert manifest.files == {} and manifest.facts["order"] == order
        assert manifest.facts["epochs"] == 0


def test_redone_when_the_packed_rows_change(tmp_path):
    corpus(tmp_path)
    pack(tmp_path, 64)
    section = Shuffle(order="written")
    first = shuffle_rows(tmp_path, section, workers=1)
    assert shuffle_rows(tmp_path, section, workers=1) == first
    pack(tmp_path, 32)
    assert shuffle_rows(tmp_path, section, workers=1).counts["rows"] > first.counts["rows"]


def test_refusals(tmp_path):
    rng = np.random.default_rng(0)
    tokenize_stage(tmp_path, [{("eval", "only"): random_documents(rng, 9, 50)}])
    pack(tmp_path, 16)
    with pytest.raises(UserError, match="no source has any rows for training"):
        shuffle_rows(tmp_path, Shuffle())
    with pytest.raises(UserError, match="'books' has a weight but no rows for training"):
        shuffle_rows(tmp_path, Shuffle(), {"books": 2.0})
    corpus(tmp_path / "b")
    pack(tmp_path / "b", 16)
    with pytest.raises(UserError, match="at least two"):
        shuffle_rows(tmp_path / "b", Shuffle(), {"books": 2.0, "web/news": None})
    with pytest.raises(UserError, match=r"the weight 1e-09 of 'books' is less than one row in an"):
        shuffle_rows(tmp_path / "b", Shuffle(), {"books": 1e-9, "web/news": 1.0})
