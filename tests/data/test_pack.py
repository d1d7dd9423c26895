"""Packing: nothing lost, nothing twice, documents cut only where allowed, bytes exact."""

import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmwright.data.manifest import files_below, hash_file, read_manifest
from lmwright.data.rows import pack as pack_module
from lmwright.data.rows.best_fit import best_fit_rows
from lmwright.data.rows.record import row_dtype, unpack_rows
from lmwright.errors import UserError
from tests.data.small_store import corpus, pack
from tests.data.token_stage import EOS, tokenize_stage


def records(manifest, split, source):
    """All records of a source, parsed by hand from the documented layout."""
    T = manifest.facts["seq_len"]
    width = np.dtype(manifest.facts["dtype"]).itemsize
    out = []
    names = sorted(n for n in manifest.files if n.startswith(f"{split}/{source}/shard-"))
    raw = b"".join((Path(manifest.folder) / n).read_bytes() for n in names)
    size = T * width + (T + 7) // 8 + 8
    assert len(raw) % size == 0
    for at in range(0, len(raw), size):
        row = raw[at : at + size]
        ids = [int.from_bytes(row[i * width : (i + 1) * width], "little") for i in range(T)]
        bits = row[T * width : T * width + (T + 7) // 8]
        starts = [i for i in range(T) if bits[i // 8] >> (i % 8) & 1]
        length, text_bytes = (
            int.from_bytes(row[k : k + 4], "little") for k in (size - 8, size - 4)
        )
        out.append((ids, starts, length, text_bytes))
    return out


def segments(rows):
    """Token lists of all segments; checks that rows are filled from the left."""
    found = []
    for ids, starts, length, _ in rows:
        assert 0 < length <= len(ids) and starts[0] == 0 and starts[-1] < length
        assert all(i == EOS for i in ids[length:])
        bounds = [*starts, length]
        found += [ids[a:b] for a, b in pairwise(bounds)]
    return found


documents = st.lists(
    st.tuples(st.lists(st.integers(4, 499), min_size=0, max_size=30), st.integers(0, 200)),
    min_size=0,
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(documents, min_size=1, max_size=3), st.integers(1, 17), st.integers(1, 60))
def test_chunk_is_the_stream_cut_every_t_tokens(tmp_path_factory, parts, T, shard_tokens):
    are_chunks(tmp_path_factory.mktemp("chunk"), parts, T, shard_tokens)


@pytest.mark.parametrize("T, shard_tokens", [(7, 20), (16, 1000)])
def test_some_documents_are_cut_every_t_tokens(T, shard_tokens, tmp_path):
    """Longer than a row, empty ones, one that ends with a row, over two parts and several
    shards."""
    rng = np.random.default_rng(0)
    parts = [
        [(rng.integers(4, 499, size).tolist(), 3 * size + 1) for size in sizes]
        for sizes in ([5, 23, 0, 1, 6], [14, 2, 0, 0, 31, 3])
    ]
    are_chunks(tmp_path, parts, T, shard_tokens)


def are_chunks(folder, parts, T, shard_tokens):
    parts = [[(d, n if d else 0) for d, n in part] for part in parts]
    tokenize_stage(folder, [{("train", "s"): part} for part in parts])
    stream = [t for part in parts for d, _ in part for t in d]
    if not stream:
        with pytest.raises(UserError, match="holds no tokens"):
            pack(folder, T, shard_tokens=shard_tokens)
        return
    rows = records(pack(folder, T, shard_tokens=shard_tokens), "train", "s")
    assert [t for ids, _, n, _ in rows for t in ids[:n]] == stream
    assert all(n == T for _, _, n, _ in rows[:-1])
    ends = np.cumsum([len(d) for part in parts for d, _ in part]).tolist()
    begins = {0, *ends} - {len(stream)} | set(range(0, len(stream), T))
    found = [r * T + i for r, (_, starts, _, _) in enumerate(rows) for i in starts]
    assert found == sorted(begins)
    assert sum(b for *_, b in rows) == sum(n for part in parts for _, n in part)
    # a row's share of the text is that of its tokens, document by document, up to rounding
    for r, (_, starts, length, share) in enumerate(rows):
        exact, at = 0.0, 0
        for part in parts:
            for d, n in part:
                inside = max(0, min(at + len(d), r * T + length) - max(at, r * T))
                exact += n * inside / max(len(d), 1)
                at += len(d)
        assert abs(share - exact) < len(starts) + 1


@settings(max_examples=30, deadline=None)
@given(st.lists(documents, min_size=1, max_size=3), st.integers(1, 17), st.integers(20, 90))
def test_best_fit_cuts_only_long_documents(tmp_path_factory, parts, T, shard_tokens):
    folder = tmp_path_factory.mktemp("fit")
    parts = [[(d, n if d else 0) for d, n in part] for part in parts]
    tokenize_stage(folder, [{("train", "s"): part} for part in parts])
    docs = [d for part in parts for d, _ in part if d]
    if not docs:
        return
    manifest = pack(folder, T, "best-fit", shard_tokens=shard_tokens)
    rows = records(manifest, "train", "s")
    expected = [d[i : i + T] for d in docs for i in range(0, len(d), T)]
    assert sorted(segments(rows)) == sorted(expected)
    assert sum(b for *_, b in rows) == sum(n for part in parts for _, n in part)
    counts = manifest.counts["sources"]["train"]["s"]
    assert counts["segments"] == len(expected) and counts["rows"] == len(rows)
    assert counts["tokens"] == sum(map(len, docs)) == sum(n for _, _, n, _ in rows)
    efficiency = manifest.facts["efficiency"]["train"]["s"]
    assert efficiency == pytest.approx(counts["tokens"] / (len(rows) * T))


def slow_best_fit(lengths, capacity):
    """Best-fit decreasing from its definition: sizes of what each row holds."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [r for r in rooms if r >= length]
        if fitting:
            best = min(fitting)
            rooms[rooms.index(best)] -= length
        else:
            rooms.append(capacity - length)
    return sorted(capacity - r for r in rooms)


@settings(deadline=None)
@given(st.integers(1, 80).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c)))))
def test_best_fit_decreasing_equals_its_definition(case):
    capacity, lengths = case
    row = best_fit_rows(np.array(lengths, np.int64), capacity)
    filled = np.bincount(row, weights=lengths).astype(int) if lengths else []
    assert sorted(filled) == slow_best_fit(lengths, capacity)


def test_rows_come_in_the_order_of_their_first_documents(tmp_path):
    """So that rows that are read as packed do not have the longest documents first."""
    sizes = [3, 9, 2, 10, 4, 7, 5]
    documents = [([10 + number] * size, size) for number, size in enumerate(sizes)]
    tokenize_stage(tmp_path, [{("train", "s"): documents}])
    rows = records(pack(tmp_path, 10, "best-fit"), "train", "s")
    found = [[ids[at] for at in starts] for ids, starts, _, _ in rows]
    assert all(row == sorted(row) for row in found) and found == sorted(found)


@pytest.mark.parametrize("method", ["chunk", "best-fit"])
def test_same_bytes_for_any_worker_count_and_windows(tmp_path, method, monkeypatch):
    for name in ("one", "two"):
        corpus(tmp_path / name)
        pack(tmp_path / name, 64, method, workers=len(name) - 1, shard_tokens=3000)
    hashes = [
        {p.relative_to(tmp_path / n): hash_file(p) for p in files_below(tmp_path / n / "pack")}
        for n in ("one", "two")
    ]
    assert len(hashes[0]) > 8 and hashes[0] == hashes[1]


def test_blocks_and_windows_do_not_change_what_is_packed(tmp_path, monkeypatch):
    corpus(tmp_path / "a")
    whole = pack(tmp_path / "a", 64, "chunk")
    monkeypatch.setattr(pack_module, "BLOCK_TOKENS", 200)
    corpus(tmp_path / "b")
    blocks = pack(tmp_path / "b", 64, "chunk")
    assert blocks.files == whole.files and blocks.counts == whole.counts
    monkeypatch.setattr(pack_module, "WINDOW_TOKENS", 500)
    monkeypatch.setattr(pack_module, "WINDOW_DOCS", 11)
    windows = pack(tmp_path / "b", 64, "best-fit")
    large = pack(tmp_path / "a", 64, "best-fit")
    for split, source in (("train", "books"), ("train", "web/news"), ("eval", "books")):
        a, b = (segments(records(m, split, source)) for m in (windows, large))
        assert sorted(a) == sorted(b)
    assert windows.total("rows") >= large.total("rows")


def test_wide_ids_and_facts(tmp_path):
    tokens = corpus(tmp_path, dtype="uint32")
    manifest = pack(tmp_path, 33, "best-fit")
    facts = manifest.facts
    assert facts["dtype"] == "uint32" and facts["eos_id"] == EOS and facts["vocab_size"] == 500
    assert manifest.fingerprint["inputs"] == {"tokenize": tokens.hash}
    sources = (("train", "books"), ("train", "web/news"), ("eval", "books"))
    largest = max(max(ids) for s in sources for ids, *_ in records(manifest, *s))
    assert manifest.counts["max_id"] == largest > 400
    assert facts["efficiency"]["train"]["books"] > 0.9


def test_unpack_rows_equals_a_plain_loop():
    rng, T, B = np.random.default_rng(2), 37, 9
    rows = np.zeros(B, row_dtype(T, "uint16"))
    lengths = [T, 1, 20, T, 0, 36, T, 5, 37]
    for b, n in enumerate(lengths):
        bits = rng.random(T) < 0.2
        bits[0], bits[n:] = n > 0, False
        rows["starts"][b] = np.packbits(bits, bitorder="little")
        rows["tokens"][b, :n] = rng.integers(1, 60_000, n)
    rows["length"] = lengths
    for attention in ("document", "row"):
        got = unpack_rows(rows, attention)
        for b, n in enumerate(lengths):
            bits = np.unpackbits(rows["starts"][b], count=T, bitorder="little")
            segment = position = 0
            for t in range(T):
                new = t == 0 or (bits[t] and attention == "document")
                segment, position = (segment + 1, 0) if new else (segment, position + 1)
                real = t < n
                assert got["segment_ids"][b, t] == segment * real
                assert got["positions"][b, t] == position * real
                assert got["loss_weight"][b, t] == (real and not new)
                assert got["tokens"][b, t] == rows["tokens"][b, t]
        assert {k: str(v.dtype) for k, v in got.items()} == {
            "tokens": "int32",
            "segment_ids": "int32",
            "positions": "int32",
            "loss_weight": "float32",
        }


def test_the_rows_that_are_asked_for_are_those_at_the_beginning(tmp_path):
    """A source of just as many is no shorter than that."""
    docs = [([*range(10, 10 + n - 1), EOS], n) for n in (7, 5, 12)]
    tokenize_stage(tmp_path, [{("train", "s"): docs}])
    stream = [i for ids, _ in docs for i in ids]
    for rows in (2, 3):
        manifest = pack(tmp_path, 8, rows={"s": rows})
        assert [i for ids, *_ in records(manifest, "train", "s") for i in ids] == stream[: 8 * rows]
    with pytest.raises(UserError, match="s: 24 tokens do not fill the 4 rows"):
        pack(tmp_path, 8, rows={"s": 4})


def test_cut_input_is_named(tmp_path):
    corpus(tmp_path)
    path = tmp_path / "tokenize" / "train" / "books" / "part-00002.tokens.bin"
    with open(path, "r+b") as f:
        f.truncate(10)
    with pytest.raises(UserError, match=r"books/part-00002.tokens.bin has 10 bytes instead of"):
        pack(tmp_path, 64)


def test_missing_input(tmp_path):
    with pytest.raises(UserError, match="tokenize: this stage has not been made"):
        pack(tmp_path, 64)


@pytest.mark.parametrize("method", ["chunk", "best-fit"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, method):
    """8 M tokens (16 MB of ids, one document of 5 M) pack within a few blocks' memory."""
    rng = np.random.default_rng(0)
    long = (rng.integers(4, 500, 5_000_000).astype(np.uint16), 20_000_000)
    docs = [(rng.integers(4, 500, 3000).astype(np.uint16), 9000) for _ in range(1000)]
    tokenize_stage(tmp_path, [{("train", "s"): [long, *docs]}])
    tracemalloc.start()
    manifest = pack(tmp_path, 1024, method)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert manifest.total("tokens") == 8_000_000
    assert peak < 64e6
    assert read_manifest(tmp_path / "pack") == manifest
