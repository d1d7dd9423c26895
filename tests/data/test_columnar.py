"""Conversations and ids of parquet and Arrow files are those that were written into them."""

import datetime
import json
import re
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.config.run import Source
from lmwright.data.sources.columns import Bad
from tests.data.test_sources import read, texts_of


def calling(name, arguments, **more):
    """A conversation that calls a tool of these arguments."""
    properties = {key: {"type": type(value).__name__} for key, value in arguments.items()}
    tool = {"name": name, "parameters": {"type": "object", "properties": properties}}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Where?", **more},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": tool}]}


CALLING = [calling("find", {"city": "Bonn", "near": {"km": 2}}), calling("wait", {"days": [1, 2]})]


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_conversations_of_columns_have_no_keys_of_other_rows(tmp_path, format_):
    """Which the types of a column fill in: `days` null in a call of `find`."""
    table = pa.Table.from_pylist(CALLING)
    assert table.to_pylist() != CALLING
    if format_ == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        pytest.importorskip("datasets").Dataset(table).save_to_disk(tmp_path)
    rows = texts_of(read(Source(path=str(tmp_path), rows="messages")))
    assert [json.loads(row) for row in rows] == CALLING


def test_whole_numbers_that_pandas_made_floats_are_ids(tmp_path):
    """As it does to a column of them in which a row has none."""
    pd = pytest.importorskip("pandas")
    whole = [*range(3), None, 2**53, 2.5, 2**60 + 1]
    pd.DataFrame({"id": whole, "text": "a"}).to_parquet(tmp_path / "a.parquet")
    pd.DataFrame({"id": whole, "text": "a"}).to_json(
        tmp_path / "a.jsonl", orient="records", lines=True
    )
    for name in ("a.parquet", "a.jsonl"):
        rows = read(Source(path=str(tmp_path / name), id_column="id"))
        assert [row.id for row in rows] == ["0", "1", "2", None, "9007199254740992", None, None]
        reasons = [row.reason for row in rows if isinstance(row, Bad)]
        assert re.fullmatch("id 'id' is (null|nan), not text or a whole number: .*", reasons[0])
        assert reasons[1].startswith("id 'id' is 2.5, not text or a whole number: write ids as te")
        assert reasons[2].startswith("id 'id' is 1.15292")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (datetime.date(2026, 1, 1), "of type date"),
        (Decimal(1), "of type Decimal"),
        (b"1", "binary"),
        (True, "true or false"),
    ],
)
def test_what_is_no_id_is_said(tmp_path, value, what):
    pq.write_table(pa.table({"id": [value], "text": ["a"]}), tmp_path / "a.parquet")
    (row,) = read(Source(path=str(tmp_path / "a.parquet"), id_column="id"))
    assert row.reason.startswith(f"id 'id' is {what}, not text or a whole number: ")


def test_conversations_of_parquet_may_have_times_and_maps(tmp_path):
    at = datetime.datetime(2025, 1, 31, 12)
    arguments = pa.map_(pa.string(), pa.string())
    call = pa.struct({"function": pa.struct({"name": pa.string(), "arguments": arguments})})
    kinds = {"role": pa.string(), "content": pa.string(), "at": pa.timestamp("s")}
    message = pa.struct({**kinds, "tool_calls": pa.list_(call)})
    row = calling("find", {"city": "Bonn"}, at=at)
    row["messages"][1]["tool_calls"][0].pop("type")
    table = pa.table({"messages": pa.array([row["messages"]], pa.list_(message))})
    pq.write_table(table, tmp_path / "a.parquet")
    (found,) = texts_of(read(Source(path=str(tmp_path), rows="messages")))
    row["messages"][0]["at"] = str(at)
    assert json.loads(found)["messages"] == row["messages"]
