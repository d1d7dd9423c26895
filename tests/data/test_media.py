"""Conversations about images, of which only the text could be read."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.config.run import Source
from lmwright.data.sources.columns import Bad, Row
from lmwright.data.sources.file import Slice
from lmwright.data.sources.files import find_files
from lmwright.data.sources.read import read_rows

ASKED = [
    "<image>\nWhat is it?",
    "What is it?\n<image>",
    "<video>",
    "What does <image> do in SVG?",
    "Where is\n<image>\nclosed?",
    "",
]
"""The first three as LLaVA's data have them."""


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_about_images_are_bad(tmp_path, ending):
    rows = [
        {
            "image": "a.jpg" if "<" in text else None,
            "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "A cat."}],
        }
        for text in ASKED
    ]
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = Source(path=str(path), rows="sharegpt")
    found = [*read_rows(Slice(find_files(source)[0]), source)]
    assert [type(row) for row in found] == [Bad, Bad, Bad, Row, Row, Row]
    assert found[1].reason == "message 1: 'value' has <image>, and only text is read"
