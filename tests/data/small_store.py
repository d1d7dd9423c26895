"""A small corpus, packed and shuffled, for the tests of packing, order and store."""

import numpy as np

from lmwright.config.run import Pack, Shuffle
from lmwright.data.rows.pack import pack_tokens
from lmwright.data.rows.record import row_dtype
from lmwright.data.rows.shuffle import shuffle_rows
from tests.data.token_stage import random_documents, tokenize_stage

T = 32
WEIGHTS = {"books": 1.0, "web/news": 2.5}


def corpus(folder, parts=4, dtype="uint16"):
    rng = np.random.default_rng(5)
    sources = [("train", "books"), ("train", "web/news"), ("eval", "books")]
    counts = (60, 25, 7)
    return tokenize_stage(
        folder,
        [
            {s: random_documents(rng, n, 90) for s, n in zip(sources, counts, strict=True)}
            for _ in range(parts)
        ],
        dtype,
    )


def pack(data_dir, seq_len, method="chunk", **options):
    options = {"workers": 1} | options
    return pack_tokens(data_dir, seq_len=seq_len, pack=Pack(method=method), **options)


def source_records(data_dir, T, split="train"):
    """Records of each train source, read by numpy alone."""
    found = {}
    for path in sorted((data_dir / "pack" / split).rglob("shard-*.bin")):
        name = path.parent.relative_to(data_dir / "pack" / split).as_posix()
        found.setdefault(name, []).append(np.fromfile(path, row_dtype(T, "uint16")))
    return {k: np.concatenate(v) for k, v in sorted(found.items())}


def prepared(folder, order="virtual", weights=None, epochs=2, attention="document"):
    corpus(folder)
    section = Pack(method="best-fit", attention=attention)
    pack_tokens(folder, seq_len=T, pack=section, workers=1, shard_tokens=1500)
    section = Shuffle(order=order, epochs=epochs, block_rows=40, seed=3)
    shuffle_rows(folder, section, weights, workers=1, shard_tokens=2000)
    return folder


def same(a, b):
    assert a.keys() == b.keys()
    for k in a:
        np.testing.assert_array_equal(a[k], b[k])
