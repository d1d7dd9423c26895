"""What is held out of a source of few documents: where the only one is cut, and what is counted."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.data.text.holdout import hold_out
from lmwright.data.text.parts import SCHEMA, part_file


def held_of(folder, *documents, fraction=0.005):
    """Texts and counts of each split after one part of these documents, of which none is held out
    by chance."""
    every = {"source": "s", "meta": "", "split": "train", "rows": "text"}
    rows = [{"id": f"d{i}", "text": text, **every} for i, text in enumerate(documents)]
    path = folder / part_file(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    source = SimpleNamespace(use="train")
    part = SimpleNamespace(number=0, name="s", source=source, holdout_fraction=fraction)
    size = sum(len(text.encode()) for text in documents)
    counts = {"sources": {"train": {"s": {"docs": len(documents), "bytes": size}}}}
    temp = folder / "temp"
    temp.mkdir()
    hold_out([part], [counts], folder, temp)
    new = temp / path.name
    texts = {"train": [], "eval": []}
    for row in pq.read_table(new if new.exists() else path).to_pylist():
        texts[row["split"]].append(row["text"])
    return texts, {split: own["s"] for split, own in counts["sources"].items()}


@pytest.mark.parametrize(
    "size, fraction, marks, cut",
    [
        (5_000, 0.005, {}, 4_500),  # a tenth, where that is less than 2,000 characters
        (100_000, 0.005, {}, 98_000),
        (100_000, 0.05, {}, 95_000),
        (5_000, 0.005, {4_600: "\n", 4_550: " "}, 4_601),  # behind a line, else behind a blank
        (5_000, 0.005, {4_900: "\n", 4_700: " "}, 4_701),  # the line is too near to the end
    ],
)
def test_a_single_document_is_cut_near_its_end(tmp_path, size, fraction, marks, cut):
    text = "".join(marks.get(i, "\u00e9") for i in range(size))
    texts, counts = held_of(tmp_path, text, fraction=fraction)
    assert texts == {"train": [text[:cut]], "eval": [text[cut:]]}
    for split, (own,) in texts.items():  # both have a document, though there was one
        assert counts[split] == {"docs": 1, "bytes": len(own.encode())}


def test_equal_documents_go_together_and_never_all_of_them(tmp_path):
    texts, counts = held_of(tmp_path, "a" * 1500, "a" * 1500)
    assert texts == {"train": ["a" * 1500] * 2, "eval": []} and counts.keys() == {"train"}
    again = tmp_path / "again"
    texts, counts = held_of(again, "a" * 9, "b" * 9, "a" * 9)
    assert {len(own) for own in texts.values()} == {1, 2}
    assert all(len(set(own)) == 1 for own in texts.values())
    assert {split: own["docs"] for split, own in counts.items()} == {
        split: len(own) for split, own in texts.items()
    }
