"""Related texts: groups stay together and whole through prepare, several in a row."""

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.config.rows import TOKENS_PER_TEXT
from lmwright.config.run import Data, Pack, Source, Tokenizer
from lmwright.data.prepare import prepare
from lmwright.data.rows.show import show_command
from lmwright.data.rows.store import TokenStore
from lmwright.data.text.chat import UnusableError
from lmwright.data.text.related import related_texts
from lmwright.data.tokens.related import fit_group
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError

T = 64


def rows(count=60):
    """Questions with their answer and up to two wrong ones, some longer than a row."""
    told = lambda i, word: f"{word} {i}" + " very" * (i % 7) * (1 + i // 4)  # noqa: E731
    made = [{"q": f"what is {i}?", "a": told(i, "it is"), "no": None} for i in range(count)]
    for i in range(1, count, 2):
        made[i]["no"] = [told(i, "it is not"), "nor this"][: 1 + i % 4 // 2]
    return made


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(row | {"no": row["no"] and json.dumps(row["no"])} for row in rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def section(folder, path, **pack):
    columns = {"anchor": "q", "positive": "a", "negative": "no"}
    return Data(
        dir=str(folder / "data"),
        sources=(Source(path=path, rows="related", columns=columns),),
        tokenizer=Tokenizer(vocab_size=300),
        pack=Pack(**{"method": "best-fit", **pack}),
    )


def groups_in(store):
    """Lists of ids, of the texts of each group, and the number of texts in each row."""
    groups, counts = [], []
    for row in range(store.epoch_rows):
        batch = {name: a[0] for name, a in store.batch(row, row + 1).items()}
        counts.append(int(batch["segment_ids"].max()))
        for segment in range(1, counts[-1] + 1):
            mine = np.flatnonzero(batch["segment_ids"] == segment)
            assert not batch["loss_weight"][mine[1:]].any()
            if batch["loss_weight"][mine[0]]:
                groups.append([])
            groups[-1].append(batch["tokens"][mine].tolist())
            assert batch["positions"][mine].tolist() == list(range(len(mine)))
    return groups, counts


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_groups_stay_together(tmp_path, ending, capsys):
    given = rows()
    data = section(tmp_path, write(tmp_path / f"texts.{ending}", given))
    summary = prepare(data, T, workers=1)
    store = TokenStore.open(data.dir)
    assert store.holds == "related texts"
    tokenizer = load_tokenizer(store.tokenizer_dir)
    found, counts = groups_in(store)
    whole = {row["q"]: [row["q"], row["a"], *(row["no"] or [])] for row in given}  # by the anchor
    cut = 0
    for group in found:
        assert all(ids[-1] == tokenizer.eos_id for ids in group)  # also where it was cut
        texts = [tokenizer.decode(ids[:-1]) for ids in group]
        wanted = whole.pop(texts[0])
        assert len(texts) == len(wanted)
        assert all(b.startswith(a) for a, b in zip(texts, wanted, strict=True))
        cut += texts != wanted
    assert not whole and max(counts) <= T // TOKENS_PER_TEXT and max(counts) > 3
    (made,) = summary.stages["tokenize"].counts["sources"]["train"].values()
    assert made["cut"] == cut > 0 and made["docs"] == 60 and made["texts"] == sum(counts)
    show_command(data.dir, 0, store.epoch_rows)
    shown = capsys.readouterr().out
    assert shown.count(", anchor:") == shown.count(", positive:") == 60
    assert shown.count(", negative:") == sum(counts) - 120


def test_short_texts_leave_a_place_for_each(tmp_path):
    given = [{"q": f"{i}", "a": f"a{i}", "no": None} for i in range(90)]
    data = section(tmp_path, write(tmp_path / "texts.jsonl", given))
    prepare(data, T, workers=1)
    found, counts = groups_in(TokenStore.open(data.dir))
    assert len(found) == 90 and sorted(counts) == [4, *[T // TOKENS_PER_TEXT] * 22]


def test_the_longest_texts_are_cut_to_one_length():
    texts = [np.arange(n, dtype=np.uint16) for n in (3, 40, 9, 30)]
    group = fit_group(texts, [7], [8], 48)
    sizes = np.diff([*np.flatnonzero(group.marks), len(group.ids)])
    assert sizes.tolist() == [5, 16, 11, 16] and group.cut and group.texts == 4
    assert fit_group(texts[:2], [7], [8], 48).ids.tolist()[:6] == [7, 0, 1, 2, 8, 7]
    many = fit_group(texts * 3, [7], [8], 48)  # more texts than there are places for
    assert many.texts == 6 and many.cut and len(many.ids) <= 48
    assert fit_group([texts[0][:0], texts[1]], [], [], 48) is None


@pytest.mark.parametrize("printed", [["b", "c"], ["it's", "c"], ["b", "it's"], ["b"]])
def test_negatives_that_python_printed_are_refused(printed):
    """They were one text with brackets and quotes."""
    row = {"anchor": "q", "positive": "a", "negative": str(printed)}
    with pytest.raises(UnusableError, match="'negative' is a list as Python prints it"):
        related_texts(row, Source(path="x.csv", rows="related"))


@pytest.mark.parametrize(
    "negative, wanted",
    [
        (None, []), ("", []), ("b", ["b"]), (["b", "c"], ["b", "c"]), ('["b", "c"]', ["b", "c"]),
        ("[a bracket", ["[a bracket"]), ('["b" and "c"]', ['["b" and "c"]']),
    ],
)  # fmt: skip
def test_negatives_of_every_format(negative, wanted):
    row = {"anchor": "a", "positive": "p", "negative": negative}
    made = related_texts(row, Source(path="x", rows="related"))
    assert made == {"anchor": "a", "positive": "p", "negatives": wanted}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"anchor": "a"}, "'positive' is not text"),
        ({"anchor": " ", "positive": "p"}, "'anchor' is empty"),
        ({"anchor": "a", "positive": "a"}, "'anchor' and 'positive' are the same"),
        ({"anchor": "a", "positive": "p", "negative": [3]}, "'negative' is not text"),
    ],
)
def test_rows_that_cannot_be_used(row, reason):
    with pytest.raises(UnusableError, match=reason):
        related_texts(row, Source(path="x", rows="related"))


def test_texts_that_would_be_cut_apart_are_refused(tmp_path):
    data = section(tmp_path, write(tmp_path / "texts.jsonl", rows(9)), method="chunk")
    with pytest.raises(UserError, match=r"\"chunk\" cuts"):
        prepare(data, T, workers=1)
