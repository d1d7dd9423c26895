"""Tagged words: aligned with tokens as the tokenizers library aligns them, and packed."""

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.config.run import Source
from lmwright.data.manifest import read_manifest
from lmwright.data.prepare import prepare
from lmwright.data.rows.record import unpack_rows
from lmwright.data.rows.show import show_command
from lmwright.data.rows.store import TokenStore
from lmwright.data.text.chat_render import UnusableError
from lmwright.data.text.tagged import tagged_words
from lmwright.data.tokens.tags import words_as_tokens
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError
from lmwright.models.eurobert import EuroBert
from tests.labeled_run import SEQ_LEN, SIZES
from tests.tagged_run import LABELS, ROWS, tagged_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tagged_run(tmp_path_factory.mktemp("tags"), EuroBert(mlp_dim=24, **SIZES))


@pytest.fixture(scope="module")
def tokenizer(run):
    return load_tokenizer(f"{run.data.dir}/tokenizer")


def test_words_are_aligned_as_in_transformers(run, tokenizer):
    """Their word numbers of words that begin with the blank before them, as in a text."""
    for row in ROWS[:12]:
        spaced = [row["tokens"][0], *(" " + word for word in row["tokens"][1:])]
        theirs = tokenizer.plain.encode(spaced, is_pretokenized=True, add_special_tokens=False)
        assert theirs.ids == tokenizer.encode(" ".join(row["tokens"]))
        numbers = np.array(theirs.word_ids)
        for room in (10_000, 20, 9, 3):
            found = words_as_tokens(tokenizer, row["tokens"], room)
            whole = numbers[room] if room < len(numbers) else len(spaced)
            length = int((numbers < whole).sum())
            assert found.ids.tolist() == theirs.ids[:length]
            words, first = np.unique(numbers[:length], return_index=True)
            np.testing.assert_array_equal(found.word, words)
            np.testing.assert_array_equal(found.first, first)
            assert found.cut == (room < len(numbers))


def test_rows_are_shown_with_their_tags(run, capsys):
    """Whatever is shown is the beginning of one of the texts, but for the end of each."""
    show_command(run.data.dir, count=10)
    shown = re.findall(r"tokens: (\S.*/.*)", capsys.readouterr().out)
    texts = [
        " ".join(f"{w}/{t}" for w, t in zip(row["tokens"], row["tags"], strict=True))
        for row in ROWS
    ]
    assert len(shown) >= 10
    for line in shown:
        line = re.sub(r"<\|\w+\|>", "", line)
        assert sum(text == line or text.startswith(f"{line} ") for text in texts) == 1


def test_rows_hold_the_tags(run, tokenizer):
    """Every word of every row is there again, with its tag, but for those that were cut."""
    store = TokenStore.open(run.data.dir)
    assert store.holds == "tagged words" and store.labels == LABELS
    wanted = set()
    for row in ROWS[:-10]:
        words = words_as_tokens(tokenizer, row["tokens"], SEQ_LEN - 1).word
        wanted.add(tuple(row["tags"][: len(words)]))
    found, words = set(), 0
    batch = unpack_rows(store.records(0, store.epoch_rows))
    for ids, weight in zip(batch["segment_ids"], batch["loss_weight"], strict=True):
        for document in range(1, ids.max() + 1):
            tags = weight[(ids == document) & (weight > 0)]
            found.add(tuple(LABELS[int(tag) - 1] for tag in tags))
            words += len(tags)
    assert found == wanted
    counts = read_manifest(f"{run.data.dir}/tokenize").counts["sources"]["train"]["texts"]
    assert counts["cut"] > 0 and sum(counts["classes"].values()) == words
    assert words + counts["words_left_out"] == sum(len(row["tags"]) for row in ROWS[:-10])


def test_parquet_and_other_columns(tmp_path):
    """Numbers stand for tags."""
    rows = [{"words": r["tokens"], "ner": [LABELS.index(tag) for tag in r["tags"]]} for r in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    columns = {"tokens": "words", "tags": "ner"}
    (tmp_path / "plain").mkdir()
    first = tagged_run(tmp_path / "plain", EuroBert(mlp_dim=24, **SIZES), rows, columns=columns)
    second = Source(path=str(tmp_path / "rows.parquet"), rows="tagged", columns=columns)

    data = replace(first.data, dir=str(tmp_path / "other"), sources=(second,))
    prepare(data, SEQ_LEN, labels=LABELS)
    counts = read_manifest(tmp_path / "other" / "tokenize").counts["sources"]["train"]
    assert sum(c["docs"] for c in counts.values()) == 60


@pytest.mark.parametrize(
    "row, said",
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "'tokens' has 2 words and 'tags' 1 tags"),
        ({"tokens": "a b", "tags": ["O"]}, "'tokens' is not a list"),
        ({"tokens": [], "tags": []}, "'tokens' is empty"),
        ({"tokens": ["a", " "], "tags": ["O", "O"]}, "word 2 of 'tokens' is empty or not text"),
        ({"tokens": ["a"], "tags": [None]}, "tag 1 of 'tags' is not a name or a number"),
    ],
)
def test_rows_that_cannot_be_used(row, said):
    with pytest.raises(UnusableError, match=said):
        tagged_words(row, Source(path="x.jsonl", rows="tagged"))


def test_another_tag_is_refused_with_its_row(tmp_path):
    rows = [*ROWS[:5], json.loads(json.dumps(ROWS[5]).replace("I-PET", "I-DOG")), *ROWS[6:]]
    with pytest.raises(UserError, match=r"texts.jsonl:6 has the tag 'I-DOG', which is not one of"):
        tagged_run(tmp_path, EuroBert(mlp_dim=24, **SIZES), rows)
