"""Labeled texts: the class comes with its text through the whole of prepare, and bad labels are
refused by name."""

import csv
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from lmwright.config.check_data import check_data
from lmwright.config.run import Data, Pack, Source, Tokenize, Tokenizer
from lmwright.data.prepare import prepare
from lmwright.data.rows.show import show_command
from lmwright.data.rows.store import TokenStore
from lmwright.data.stale import find_changes
from lmwright.data.text.chat import UnusableError
from lmwright.data.text.labeled import class_of, labeled_text
from lmwright.data.tokens.around import ids_between
from lmwright.data.tokens.classes import joined, labels_text
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError

LABELS = ("red", "green", "blue")
T = 48


def rows(count=60):
    """Texts that name their own class, some longer than a row."""
    told = lambda i: f"{i} is {LABELS[i % 3]}" + " very" * (i % 7) * (1 + i // 4)  # noqa: E731
    return [{"text": told(i), "label": LABELS[i % 3]} for i in range(count)]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def section(folder, path, **source):
    return Data(
        dir=str(folder / "data"),
        sources=(Source(path=path, rows="labeled", **source),),
        tokenizer=Tokenizer(vocab_size=300),
        pack=Pack(method="best-fit"),
    )


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_each_document_keeps_its_class(tmp_path, ending, capsys):
    given = rows()
    data = section(tmp_path, write(tmp_path / f"texts.{ending}", given))
    summary = prepare(data, T, labels=LABELS, workers=1)
    store = TokenStore.open(data.dir)
    assert store.holds == "labeled texts" and store.labels == LABELS
    tokenizer = load_tokenizer(store.tokenizer_dir)
    seen, shared = {}, 0
    for row in range(store.epoch_rows):
        batch = {name: a[0] for name, a in store.batch(row, row + 1).items()}
        count = batch["segment_ids"].max()
        shared += count > 1
        for segment in range(1, count + 1):
            mine = np.flatnonzero(batch["segment_ids"] == segment)
            number, _, rest = tokenizer.decode(batch["tokens"][mine].tolist()).partition(" is ")
            assert rest.startswith(LABELS[int(batch["loss_weight"][mine[0]])])
            assert not batch["loss_weight"][mine[1:]].any()
            assert batch["tokens"][mine[-1]] == tokenizer.eos_id  # also where the text was cut
            seen[int(number)] = int(batch["loss_weight"][mine[0]])
    assert seen == {i: i % 3 for i in range(60)} and shared > 5
    (counts,) = summary.stages["tokenize"].counts["sources"]["train"].values()
    assert counts["classes"] == {name: 20 for name in LABELS}
    sizes = [len(tokenizer.encode(row["text"])) + 1 for row in given]
    assert counts["cut"] == sum(size > T for size in sizes) > 0
    show_command(data.dir, 0, store.epoch_rows)
    shown = capsys.readouterr().out
    assert Counter(name for name in LABELS for _ in range(shown.count(f", {name}:"))) == Counter(
        {name: 20 for name in LABELS}
    )


def test_two_texts_are_one_document(tmp_path):
    """Each with its end, whole where they fit; the longer one is cut first."""
    long = "word " * 100
    given = [("one", "two"), ("three", None), ("four", long), (long, "five"), (long, long + "b")]
    lines = [{"text": a, "second": b, "label": "red"} for a, b in given]
    lines += [{"text": "x", "second": "y", "label": name} for name in LABELS]
    path = write(tmp_path / "texts.jsonl", lines)
    data = section(tmp_path, path, columns={"text_pair": "second"})
    summary = prepare(data, T, labels=LABELS, workers=1)
    store = TokenStore.open(data.dir)
    tokenizer = load_tokenizer(store.tokenizer_dir)
    found = set()
    for row in range(store.epoch_rows):
        batch = {name: a[0] for name, a in store.batch(row, row + 1).items()}
        for segment in range(1, batch["segment_ids"].max() + 1):
            found.add(tuple(batch["tokens"][batch["segment_ids"] == segment].tolist()))
    one = lambda text, most=T: [*tokenizer.encode(text)[:most], tokenizer.eos_id]  # noqa: E731
    left = T - 2 - len(tokenizer.encode("four"))
    wanted = [
        [*one("one"), *one("two")], one("three"), [*one("four"), *one(long, left)],
        [*one(long, T - 2 - len(tokenizer.encode("five"))), *one("five")],
        [*one(long, (T - 2) // 2), *one(long, (T - 2) // 2)], [*one("x"), *one("y")],
    ]  # fmt: skip
    assert found == set(map(tuple, wanted))
    (counts,) = summary.stages["tokenize"].counts["sources"]["train"].values()
    assert counts["cut"] == 3


def test_two_texts_are_joined_as_the_tokenizer_joins_them(tmp_path):
    """BERT's has one mark between them; transformers and `predict` give the ids of the store."""
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(
        WordPiece({name: i for i, name in enumerate("[UNK] [CLS] [SEP] red green blue".split())})
    )
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )  # fmt: skip
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )
    theirs.save_pretrained(tmp_path / "bert")
    pairs = [("red green", "blue"), ("blue " * 9, "red " * 30), ("green", "red red")]
    given = [{"text": a, "text_pair": b, "label": "red"} for a, b in pairs]
    given += [{"text": name, "label": name} for name in LABELS]
    data = replace(
        section(tmp_path, write(tmp_path / "texts.jsonl", given)),
        tokenizer=Tokenizer(path=str(tmp_path / "bert")),
        tokenize=Tokenize(prepend="bos"),
    )
    prepare(data, T, labels=LABELS, workers=1)
    store = TokenStore.open(data.dir)
    found = set()
    for row in range(store.epoch_rows):
        batch = {name: a[0] for name, a in store.batch(row, row + 1).items()}
        for segment in range(1, batch["segment_ids"].max() + 1):
            found.add(tuple(batch["tokens"][batch["segment_ids"] == segment].tolist()))
    wanted = [theirs(a, b, truncation=True, max_length=T)["input_ids"] for a, b in pairs]
    assert found == {*map(tuple, wanted), *(tuple(theirs(name)["input_ids"]) for name in LABELS)}
    tokenizer = load_tokenizer(tmp_path / "bert")
    between = ids_between(tokenizer, (1,), (2,))
    ids = [tokenizer.encode_batch(side) for side in zip(*pairs, strict=True)]
    for a, b, whole in zip(*ids, wanted, strict=True):
        assert [1, *joined([a, b], T, (1,), (2,), between)[0], 2] == whole
    assert ids_between(tokenizer, (), (2,)) == (2,)  # a run that begins its texts otherwise


@pytest.mark.parametrize(
    "label, labels, number",
    [
        ("green", LABELS, 1), (1, LABELS, 1), ("2", LABELS, 2), (2.0, LABELS, 2), (3, LABELS, None),
        ("Green", LABELS, None), (1, ("1", "0"), 0), (2, ("1", "0"), None), (-1, LABELS, None),
        (True, ("false", "true"), 1), (" red ", LABELS, 0), (0.5, LABELS, None),
    ],
)  # fmt: skip
def test_labels_of_every_format(label, labels, number):
    made = labeled_text({"text": "a", "label": label}, Source(path="x", rows="labeled"))
    assert class_of(made["label"], labels) == number


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"text": "a", "kind": None}, "'kind' is not a name or a number"),
        ({"text": "a", "kind": math.nan}, "'kind' is not a name"),
        ({"text": "a"}, "'kind' is not a name"),
        ({"text": "", "kind": "red"}, "'text' is empty"),
        ({"text": 4, "kind": "red"}, "'text' is not text"),
    ],
)
def test_rows_without_a_text_or_a_label(row, reason):
    with pytest.raises(UnusableError, match=reason):
        labeled_text(row, Source(path="x", rows="labeled", columns={"label": "kind"}))


def test_what_is_refused(tmp_path):
    path = write(tmp_path / "texts.jsonl", rows(9))
    data = section(tmp_path, path, name="colors")
    with pytest.raises(UserError, match=r"colors: .*texts.jsonl:3 has the label 'blue', which is "
                       r"not one of objective.labels = \['red', 'green'\]; add it"):  # fmt: skip
        prepare(data, T, labels=LABELS[:2], workers=1)
    with pytest.raises(UserError, match=r"no text for training is of the class \['mauve'\], of 9.*"
                       "leave the class out, and then give labels by name: numbers"):  # fmt: skip
        prepare(data, T, labels=(*LABELS, "mauve"), workers=1)
    with pytest.raises(UserError, match=r"\"chunk\" cuts"):
        prepare(Data(dir=data.dir, sources=data.sources), T, labels=LABELS, workers=1)
    with pytest.raises(UserError, match=r"labeled texts, which need objective\.labels"):
        prepare(data, T, workers=1)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_numbers_come_as_they_are(tmp_path, ending, capsys):
    """Negative ones and fractions; what is none ends prepare with its row."""
    numbers = [round(1.5 * i - 30.25, 2) for i in range(60)]
    given = [{"text": f"{i} is", "label": n} for i, n in enumerate(numbers)]
    data = section(tmp_path, write(tmp_path / f"texts.{ending}", given))
    summary = prepare(data, T, labels=(), workers=1)
    store = TokenStore.open(data.dir)
    assert store.holds == "texts with a number" and store.labels == ()
    batch = store.batch(0, store.epoch_rows)
    first = (batch["positions"] == 0) & (batch["segment_ids"] > 0)
    assert sorted(batch["loss_weight"][first].tolist()) == numbers
    assert not batch["loss_weight"][~first].any()
    (counts,) = summary.stages["tokenize"].counts["sources"]["train"].values()
    text = labels_text(counts)
    assert f"60 numbers of mean {np.mean(numbers):.4g} and standard deviation" in text
    assert text.endswith(f" {np.std(numbers):.4g}")
    show_command(data.dir, 0, store.epoch_rows)
    shown = capsys.readouterr().out
    assert ", -30.25:" in shown and ", 58.25:" in shown


@pytest.mark.parametrize("label", ["high", "1e400", "nan", True, 1e39])
def test_what_is_no_number(tmp_path, label):
    path = write(
        tmp_path / "texts.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": label}]
    )
    with pytest.raises(UserError, match=r"texts.jsonl:2 has the label .*, which is not a finite"):
        prepare(section(tmp_path, path), T, labels=(), workers=1)


def test_other_classes_tokenize_again(tmp_path):
    data = section(tmp_path, write(tmp_path / "texts.jsonl", rows()))
    prepare(data, T, labels=LABELS, workers=1)
    prepare(data, T, labels=LABELS[::-1], workers=1)
    store = TokenStore.open(data.dir)
    assert store.labels == LABELS[::-1]
    batch = store.batch(0, store.epoch_rows)
    first = (batch["positions"] == 0) & (batch["segment_ids"] > 0)
    assert Counter(batch["loss_weight"][first].tolist()) == {0.0: 20, 1.0: 20, 2.0: 20}


def test_rows_without_a_label_are_left_out(tmp_path):
    """SNLI has the label -1 where people did not agree."""
    told = [-1, 0, 1, 2, -1, 0]
    given = [{"text": f"{i} is red", "label": told[i % 6]} for i in range(60)]
    path = write(tmp_path / "texts.parquet", given)
    with pytest.raises(UserError, match=r"or name the label in data\.sources\.unlabeled to leave"):
        prepare(section(tmp_path / "all", path), T, labels=LABELS, workers=1)
    data = section(tmp_path, path, unlabeled=("-1",))
    summary = prepare(data, T, labels=LABELS, workers=1)
    assert summary.input()["texts"]["empty"] == 20 and summary.input()["texts"]["bad"] == 0
    (train,) = summary.rows()
    assert train["classes"] == {"red": 20, "green": 10, "blue": 10}
    other = replace(data, sources=(replace(data.sources[0], unlabeled=()),))
    (change,) = find_changes(other)
    assert change == ("data.sources.0.unlabeled", ["-1"], [])
    (change,) = find_changes(replace(data, sources=(replace(data.sources[0], unlabeled=("x",)),)))
    wrong = replace(data.sources[0], rows="related")
    with pytest.raises(UserError, match=r'unlabeled: has no effect on rows = "related"'):
        check_data(replace(data, sources=(wrong,)), T)
