"""Tokenize: the files hold exactly the ids, ends and bytes of every document, in input order."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmwright.config.run import Data, Source, Tokenize, Tokenizer
from lmwright.data.manifest import read_manifest
from lmwright.data.text.normalize import normalize
from lmwright.data.tokens.tokenize import tokenize
from lmwright.data.tokens.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from lmwright.data.tokens.tokenizer_stage import make_tokenizer, sample_texts
from lmwright.errors import UserError

CORPUS = ["the quick brown fox jumps over the lazy dog. " * 20, "def f(x):\n    return x\n" * 20]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(CORPUS, Tokenizer(vocab_size=300)), folder)
    return folder


def prepared(folder, sources, path, holdout=0.0):
    """Normalized text and a tokenizer in `folder`."""
    found = []
    for name, texts in sources.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        found.append(Source(path=str(file)))
    data = Data(dir=str(folder / "data"), sources=tuple(found), holdout_fraction=holdout)
    normalize(data, workers=1)
    make_tokenizer(data.dir, Tokenizer(path=str(path)))
    return Path(data.dir)


def documents(manifest, split, source):
    """(ids, text bytes) of every document, read from the documented layout."""
    found = []
    names = sorted(n for n in manifest.files if n.startswith(f"{split}/{source}/"))
    for name in (n for n in names if n.endswith(".tokens.bin")):
        path = Path(manifest.folder) / name
        ids = np.fromfile(path, np.dtype(manifest.facts["dtype"]).newbyteorder("<")).tolist()
        start = 0
        for end, size in np.load(str(path).replace(".tokens.bin", ".docs.npy")).tolist():
            found.append((ids[start:end], size))
            start = end
        assert start == len(ids)
    return found


texts = st.lists(st.text(st.characters(codec="utf-8"), max_size=40), min_size=1, max_size=25)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    a=texts,
    b=texts,
    part_bytes=st.integers(1, 400),
    edges=st.sampled_from([("none", "eos"), ("bos", "eos"), ("bos", "none"), ("none", "none")]),
)
def test_every_document_in_its_place(tmp_path_factory, tokenizer_dir, a, b, part_bytes, edges):
    folder = tmp_path_factory.mktemp("tokenize")
    if not any(t.strip() for t in [*a, *b]):
        return
    data_dir = prepared(folder, {"a": a, "b": b}, tokenizer_dir, holdout=0.3)
    prepend, append = edges
    manifest = tokenize(
        data_dir, Tokenize(prepend=prepend, append=append), workers=1, part_bytes=part_bytes
    )
    tokenizer = load_tokenizer(tokenizer_dir)
    total = 0
    for name, given_texts in (("a", a), ("b", b)):
        kept = [t for t in given_texts if t.strip()]
        around = [tokenizer.eos_id] * (append == "eos")
        expected = [
            (
                [tokenizer.bos_id] * (prepend == "bos") + tokenizer.encode(t) + around,
                len(t.encode()),
            )
            for t in kept
        ]
        found = {s: documents(manifest, s, name) for s in ("train", "eval")}
        assert sorted(found["train"] + found["eval"]) == sorted(expected)
        for split, docs in found.items():
            # in input order within a split
            rest = iter(expected)
            assert all(doc in rest for doc in docs)
            if docs:
                counts = manifest.counts["sources"][split][name]
                assert counts["docs"] == len(docs)
                assert counts["tokens"] == sum(len(ids) for ids, _ in docs)
                assert counts["bytes"] == sum(size for _, size in docs)
        total += len(kept)
    assert manifest.total("docs") == total


def test_facts_and_routes(tmp_path, tokenizer_dir):
    data_dir = prepared(tmp_path, {"a": ["fox <|endoftext|> dog", "x"]}, tokenizer_dir)
    by_route = {}
    for route in ("auto", "tiktoken", "tokenizers"):
        manifest = tokenize(data_dir, Tokenize(route=route), workers=1)
        by_route[route] = documents(manifest, "train", "a")
    assert by_route["auto"] == by_route["tiktoken"] == by_route["tokenizers"]
    tokenizer = load_tokenizer(tokenizer_dir)
    assert manifest.facts == {
        "vocab_size": 300,
        "dtype": "uint16",
        "eos_id": 299,
        "bos_id": 299,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "masked": False,
        "pairs": False,
        "rated": False,
    }
    # the special token that the text holds ends no document
    assert [ids.count(299) for ids, _ in by_route["auto"]] == [1, 1]


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    tokens = [bytes([b]) for b in range(256)] + [chr(c).encode() for c in range(0x4000, 0xD800)]
    tokens += [f"{i:05d}".encode() for i in range(70_000 - len(tokens))]
    lines = [b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens)]
    (tmp_path / "big.tiktoken").write_bytes(b"".join(lines))
    sidecar = {"pattern": r"\d{5}|[\s\S]", "special_tokens": {"<e>": 70_000}, "eos_token": "<e>"}
    (tmp_path / "big.tiktoken.json").write_text(json.dumps(sidecar))
    data_dir = prepared(tmp_path, {"a": ["A\u4f60", "30800"]}, tmp_path / "big.tiktoken")
    manifest = tokenize(data_dir, Tokenize(), workers=1)
    assert manifest.facts["dtype"] == "uint32" and manifest.facts["vocab_size"] == 70_001
    first = 256 + 0xD800 - 0x4000
    assert documents(manifest, "train", "a") == [
        ([ord("A"), 256 + 0x4F60 - 0x4000, 70_000], 4),
        ([first + 30800, 70_000], 5),
    ]


def test_a_changed_tokenizer_is_noticed(tmp_path, tokenizer_dir):
    data_dir = prepared(tmp_path, {"a": CORPUS}, tokenizer_dir)
    first = tokenize(data_dir, Tokenize(), workers=1)
    assert tokenize(data_dir, Tokenize(), workers=1).hash == first.hash
    make_tokenizer(data_dir, Tokenizer(vocab_size=280))
    second = tokenize(data_dir, Tokenize(), workers=1)
    assert second.facts["tokenizer_fingerprint"] != first.facts["tokenizer_fingerprint"]
    assert second.total("tokens") > first.total("tokens")


def test_what_is_missing(tmp_path, tokenizer_dir):
    with pytest.raises(UserError, match="normalize: this stage has not been made"):
        tokenize(tmp_path / "data", Tokenize())
    with pytest.raises(UserError, match="normalize: this stage has not been made"):
        make_tokenizer(tmp_path / "data", Tokenizer())
    with pytest.raises(UserError, match=r"data\.tokenizer\.path: .*nowhere does not exist"):
        make_tokenizer(tmp_path / "data", Tokenizer(path=str(tmp_path / "nowhere")))
    bare = tmp_path / "bare"
    bare.mkdir()
    backend = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    backend["added_tokens"] = []
    (bare / "tokenizer.json").write_text(json.dumps(backend))
    data_dir = prepared(tmp_path, {"a": CORPUS}, bare)
    with pytest.raises(UserError, match='add "eos_token" to the tokenizer_config'):
        tokenize(data_dir, Tokenize())
    assert not (data_dir / "tokenize").exists()


def test_sample_is_within_its_budget_and_spread(tmp_path, tokenizer_dir):
    docs = [f"{i:05d} " * 10_000 for i in range(40)]
    data_dir = prepared(
        tmp_path, {"a": docs, "b": ["short \u00e9"] * 300}, tokenizer_dir, holdout=0.1
    )
    manifest = read_manifest(data_dir / "normalize")
    train = sum(e["bytes"] for e in manifest.counts["sources"]["train"].values())
    assert sum(len(t.encode()) for t in sample_texts(manifest, 10**9)) == train
    sample = list(sample_texts(manifest, 500_000))
    assert 450_000 < sum(len(t.encode()) for t in sample) <= 500_000
    assert len({t[:5] for t in sample}) > 20
    held_out = {d["text"] for d in eval_rows(manifest)}
    assert held_out and not {t for t in sample_texts(manifest, 10**9)} & held_out


def eval_rows(manifest):
    import pyarrow.parquet as pq

    for name in manifest.files:
        if name.endswith(".parquet"):
            rows = pq.read_table(Path(manifest.folder) / name).to_pylist()
            yield from (row for row in rows if row["split"] == "eval")


def test_chat_template_of_the_run_wins(tmp_path, tokenizer_dir):
    make_tokenizer(tmp_path, Tokenizer(path=str(tokenizer_dir), chat_template="{{ messages }}"))
    assert load_tokenizer(tmp_path / "tokenizer").chat_template == "{{ messages }}"
