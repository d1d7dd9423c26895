"""Sources that take documents of some lengths: counted by another tokenizer's library."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from lmwright.config.run import Data, Normalize, Pack, Source, Tokenizer
from lmwright.data.manifest import read_manifest
from lmwright.data.prepare import prepare
from lmwright.data.tokens.tokenizer import save_tokenizer
from lmwright.errors import UserError
from tests.data.chat_problem import chat_tokenizer


@pytest.fixture
def data(tmp_path):
    """Two sources of the same texts, and the lengths of these with the token that ends each."""
    tokenizers = pytest.importorskip("tokenizers")
    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(["ab", "cde", "f"], k=draw.randint(1, 60))) for _ in range(90)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    sizes = [len(theirs.encode(text, add_special_tokens=False).ids) + 1 for text in texts]
    source = Source(path=str(tmp_path / "a.jsonl"), name="long", min_tokens=60, max_tokens=120)
    return Data(
        dir=str(tmp_path / "data"),
        sources=(source, replace(source, name="any", min_tokens=None, max_tokens=None)),
        tokenizer=Tokenizer(path=str(tmp_path / "tokenizer")),
        pack=Pack(method="best-fit"),
    ), sizes


def counts_of(data):
    prepare(data, 128, workers=1)
    return read_manifest(Path(data.dir) / "tokenize").counts["sources"]["train"]


def test_documents_within_the_lengths(data):
    data, sizes = data
    counts = counts_of(data)
    wanted = [size for size in sizes if 60 <= size <= 120]
    assert min(sizes) < 60 and max(sizes) > 120
    assert 0 < len(wanted) == counts["long"]["docs"]
    assert counts["long"]["tokens"] == sum(wanted)
    assert counts["long"]["other_length"] == len(sizes) - len(wanted)
    assert counts["any"]["docs"] == len(sizes) and "other_length" not in counts["any"]


def test_other_lengths_read_the_texts_no_second_time(data):
    data, _ = data
    counts_of(data)
    first = read_manifest(Path(data.dir) / "normalize")
    fewer = replace(data, sources=(replace(data.sources[0], min_tokens=100), data.sources[1]))
    counts = counts_of(fewer)
    assert read_manifest(Path(data.dir) / "normalize").hash == first.hash
    assert counts["long"]["docs"] + counts["long"]["other_length"] == counts["any"]["docs"]


def test_what_contradicts_itself(data):
    data, _ = data
    long, any_ = data.sources
    with pytest.raises(UserError, match=r"0\.min_tokens: 60 is above max_tokens = 5; swap"):
        counts_of(replace(data, sources=(replace(long, max_tokens=5), any_)))
    exact = Normalize(dedup="exact")
    with pytest.raises(UserError, match='dedup: "exact" keeps the documents of a file'):
        counts_of(replace(data, normalize=exact))
    idle = replace(any_, use="eval", weight=1.0), replace(any_, sample_seed=3)
    with pytest.raises(UserError) as both:  # without a run file, too
        counts_of(replace(data, sources=idle, tokenizer=replace(data.tokenizer, train="unigram")))
    for place in ("data.sources.0.weight: has no", "data.tokenizer.train: has no effect beside"):
        assert place in str(both.value)
    assert not Path(data.dir).exists()


def test_lengths_that_leave_nothing_are_named(data):
    data, sizes = data
    none = replace(data, sources=(replace(data.sources[0], min_tokens=9_000, max_tokens=None),))
    with pytest.raises(UserError, match=f"all {len(sizes)} documents are shorter than min_tokens"):
        prepare(none, 128, workers=1)
