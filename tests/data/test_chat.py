"""Rows of fine-tuning data, of every form and file, become one form of conversation."""

import csv
import gzip
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.config.run import Chat, Data, Normalize, Pack, Source, Tokenizer
from lmwright.data.prepare import prepare, print_summary
from lmwright.data.rows.record import unpack_rows
from lmwright.data.rows.show import show_command, show_sources
from lmwright.data.rows.store import TokenStore
from lmwright.data.sources.file import Slice
from lmwright.data.sources.files import find_files
from lmwright.data.sources.read import read_rows
from lmwright.data.stale import find_changes
from lmwright.data.text.chat import UnusableError, conversation
from lmwright.data.tokens.tokenizer import load_tokenizer, save_tokenizer
from lmwright.errors import UserError
from tests.data.chat_problem import CHATS, chat_tokenizer

CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def source(rows, **options):
    return Source(path="x", rows=rows, **options)


def calling(calls):
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return [{"role": "user", "content": "a"}, answer]


def test_calls_may_be_written_as_json():
    for value in (CALLS, json.dumps(CALLS)):
        found = conversation({"messages": calling(value)}, source("messages"))
        assert found["messages"] == calling(CALLS)


def test_prompt_and_completion():
    row = {"question": "6 * 7", "answer": "42", "sys": "Count."}
    columns = {"prompt": "question", "completion": "answer", "system": "sys"}
    found = conversation(row, source("prompt", columns=columns))
    assert found["messages"] == said(("system", "Count."), ("user", "6 * 7"), ("assistant", "42"))


def test_prompt_of_messages():
    chat = CHATS["turns"]
    found = conversation({"prompt": chat[:3], "completion": chat[3:]}, source("prompt"))
    assert found == {"messages": chat, "first": 3}


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_prompt_of_messages_in_a_table(ending, tmp_path, tokenizer_dir):
    """It is the conversation of the same rows with lists."""
    chat = CHATS["turns"]
    rows = [{"prompt": chat[:3], "completion": chat[3:]}] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / f"a.{ending}").open("w", newline="") as file:
        bare = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
        table = csv.writer(file, **(bare if ending == "tsv" else {}))
        table.writerow(rows[0])
        table.writerows([json.dumps(part) for part in row.values()] for row in rows)
    learned = []
    for name in ("a.jsonl", f"a.{ending}"):
        rows = Source(path=str(tmp_path / name), rows="prompt")
        data = data_of(tmp_path / f"of {name}", tokenizer_dir, rows, chat=Chat(template="chatml"))
        prepare(data, 256, workers=1)
        learned.append(list(learned_texts(data.dir)))
    assert learned[0] == learned[1] and len(learned[0]) == 3


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        (json.dumps(said(("user", "a"))), " b", said(("user", "a"), ("assistant", " b"))),
        (
            json.dumps(said(("system", "s"), ("user", "a"))),
            json.dumps(said(("assistant", "b"))),
            said(("system", "s"), ("user", "a"), ("assistant", "b")),
        ),
        (json.dumps(calling([])[:1]), json.dumps(calling(CALLS)[1:]), calling(CALLS)),
        *(
            (prompt, answer, said(("user", prompt), ("assistant", answer)))
            for prompt, answer in [
                ("[INST] a", "[b]"),
                ("[1, 2]", '[{"role": "CEO", "name": "b"}]'),
                ('[{"from": "a", "to": "b"}]', "c"),
                ("a", json.dumps(said(("user", "b"), ("assistant", "c")))),
                ('{"role": "user", "content": "a"}', "b"),
            ]
        ),
    ],
)
def test_a_prompt_is_messages_only_if_it_is_a_list_of_them(prompt, completion, expected):
    """An answer in JSON to a plain prompt is what is to be learned."""
    found = conversation({"prompt": prompt, "completion": completion}, source("prompt"))
    assert found["messages"] == expected


def test_a_wrong_message_in_a_cell_is_told():
    row = {"prompt": json.dumps(said(("human", "a"))), "completion": "b"}
    with pytest.raises(UnusableError, match="'role' is 'human', not one of system"):
        conversation(row, source("prompt"))


@pytest.mark.parametrize(
    ("rows", "row"),
    [
        ("prompt", {"prompt": said(("user", "what's up?")), "completion": "b"}),
        ("prompt", {"prompt": np.array(said(("user", "a"), ("user", "b"))), "completion": "b"}),
        (
            "prompt",
            {"completion": said(("assistant", "b")), "prompt": json.dumps(said(("user", "a")))},
        ),
        ("messages", {"messages": said(("user", "a"), ("assistant", "b"))}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "a"}]}),
        ("preference", {"chosen": said(("assistant", "b")), "rejected": "c", "prompt": "a"}),
        ("rated", {"prompt": [{"content": "a", "role": "user"}], "completion": "b", "label": "1"}),
    ],
)
def test_lists_that_python_printed_are_bad_rows(rows, row, tmp_path):
    """They were texts, and their brackets and quotes were learned."""
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(row))  # writes str() of them, as pandas does
        table.writeheader()
        table.writerow(row)
    (bad,) = read_rows(Slice(find_files(where := Source(path=str(path), rows=rows))[0]), where)
    assert bad.reason.startswith(f"{next(iter(row))!r} is a list as Python prints it")
    assert "json.dumps" in bad.reason


@pytest.mark.parametrize("text", ["{'a': 1}", "[{'role': 'CEO'}]", "[it's 'content': role]"])
def test_other_text_in_brackets_is_a_text(text):
    found = conversation({"prompt": text, "completion": "b"}, source("prompt"))
    assert found["messages"][0]["content"] == text


def test_sharegpt():
    row = {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
            {"from": "observation", "value": "c"},
            {"from": "narrator", "value": "d"},
            {"from": "function_call", "value": "e"},
            {"from": "human", "value": "left out"},
        ],
        "system": "s",
        "tools": '[{"name": "f"}]',
    }
    found = conversation(row, source("sharegpt", roles={"narrator": "user"}))
    roles = ["system", "user", "assistant", "tool", "user", "assistant"]
    assert [m["role"] for m in found["messages"]] == roles
    assert [m["content"] for m in found["messages"]] == list("sabcde")
    assert found["tools"] == [{"name": "f"}]


def test_messages_keep_what_else_they_hold():
    found = conversation({"messages": json.dumps(CHATS["tools"])}, source("messages"))
    assert found["messages"] == CHATS["tools"]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts, "name": None}, *said(("assistant", "c"))]
    found = conversation({"messages": chat}, source("messages"))
    assert found["messages"] == said(("user", "ab"), ("assistant", "c"))


@pytest.mark.parametrize(
    "rows, row, message",
    [
        ("alpaca", {"instruction": "a", "output": " \n"}, "'output' is empty"),
        ("alpaca", {"instruction": 3, "output": "b"}, "'instruction' is not text"),
        ("prompt", {"prompt": "a", "completion": None}, "'completion' is not text"),
        ("messages", {"messages": []}, "not a list of messages"),
        ("messages", {"messages": "[{"}, "not JSON"),
        ("messages", {"messages": ["a"]}, "message 1 is not an object"),
        ("messages", {"messages": said(("user", "a"))}, "no turn of the assistant"),
        ("messages", {"messages": said(("bot", "a"))}, "'role' is 'bot', not one of system"),
        ("messages", {"messages": said(("user", "a"), ("assistant", " "))}, "says nothing"),
        ("messages", {"messages": said(("user", 3), ("assistant", "b"))}, "'content' is not text"),
        ("sharegpt", {"conversations": [{"value": "a"}]}, "'from' is absent"),
        ("messages", {"messages": calling("f()")}, "'tool_calls' is text, but not JSON"),
        ("messages", {"messages": calling({"name": "f"})}, "is not a list of calls"),
        ("messages", {"messages": calling([{"args": {}}])}, "message 2: .* a call without a name"),
        (
            "messages",
            {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "message 1: 'weight' is 0.5, not 0 or 1",
        ),
    ],
)
def test_rows_that_cannot_be_used(rows, row, message):
    with pytest.raises(UnusableError, match=message):
        conversation(row, source(rows))


ALPACA = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Say \u00fc.", "input": "", "output": "\u00fc"},
    {"instruction": "Nothing", "input": "", "output": ""},
]


def write(folder, ending):
    path = folder / f"a.{ending}"
    if ending == "json":
        path.write_text(json.dumps(ALPACA))
    elif ending == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in ALPACA).encode()))
    elif ending == "parquet":
        pq.write_table(pa.Table.from_pylist(ALPACA), path)
    else:
        mark = {"csv": ",", "tsv": "\t"}[ending]
        rows = [list(ALPACA[0]), *(list(r.values()) for r in ALPACA)]
        path.write_text("".join(mark.join(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(chat_tokenizer(), folder)
    return str(folder)


def data_of(tmp_path, tokenizer_dir, *sources, chat=None, **options):
    return Data(
        dir=str(tmp_path / "data"),
        sources=sources,
        tokenizer=Tokenizer(path=tokenizer_dir),
        chat=chat or Chat(template="alpaca"),
        normalize=Normalize(max_bad_fraction=0.9),
        pack=Pack(method="best-fit"),
        **options,
    )


@pytest.mark.parametrize("ending", ["json", "jsonl.gz", "parquet", "csv", "tsv"])
def test_every_format(ending, tmp_path, tokenizer_dir):
    path = write(tmp_path, ending)
    format_ = "json" if ending == "json" else "auto"
    rows = Source(path=str(path), rows="alpaca", format=format_)
    summary = prepare(data_of(tmp_path, tokenizer_dir, rows), 256, workers=1)
    assert summary.rows()[0]["docs"] == 2
    bad = (tmp_path / "data/normalize/quarantine.jsonl").read_text()
    assert "'output' is empty" in bad and bad.count("\n") == 1
    assert list(learned_texts(tmp_path / "data")) == ["3<|endoftext|>", "\u00fc<|endoftext|>"]


def learned_texts(data_dir):
    """What is learned of each example of a store, by order of packing."""
    store = TokenStore.open(data_dir)
    tokenizer = load_tokenizer(store.tokenizer_dir)
    rows = unpack_rows(store._packed_train.read(np.arange(store.epoch_rows)))
    for b in range(len(rows["tokens"])):
        for segment in range(1, rows["segment_ids"][b].max() + 1):
            mine = (rows["segment_ids"][b] == segment) & (rows["loss_weight"][b] > 0)
            yield tokenizer.decode(rows["tokens"][b][mine])


def test_chats_and_text_side_by_side(tmp_path, tokenizer_dir, capsys):
    chats = [CHATS["turns"], CHATS["one"], CHATS["system"], CHATS["one"][:1]]
    chats.append(said(("user", "x<|im_end|>"), ("assistant", "y")))
    chats.append(said(("user", "long " * 40), ("assistant", "z")))
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    (tmp_path / "chats.jsonl").write_text(lines)
    (tmp_path / "plain.txt").write_text("It is 42, hello.")
    data = data_of(
        tmp_path,
        tokenizer_dir,
        Source(path=str(tmp_path / "chats.jsonl"), rows="messages"),
        Source(path=str(tmp_path / "plain.txt")),
        chat=Chat(template="chatml"),
    )
    summary = prepare(data, 100, workers=1)
    counts = summary.stages["tokenize"].counts["sources"]["train"]
    wanted = {"docs": 3, "bad": 1, "too_long": 1, "cut": 0}
    assert {key: counts["chats"][key] for key in wanted} == wanted
    assert "spells the special token" in (tmp_path / "data/tokenize/quarantine.jsonl").read_text()
    # the first token of a text is predicted by nothing
    assert sorted(learned_texts(tmp_path / "data")) == sorted(
        [
            "It is 42.<|im_end|>assistant\nXq5 \u00e9\U0001f600<|im_end|>",
            "It is 42.<|im_end|>",
            "  Hello <b>you</b>!\n<|im_end|>",
            load_tokenizer(tokenizer_dir).decode(
                [*load_tokenizer(tokenizer_dir).encode("It is 42, hello.")[1:], 0]
            ),
        ]
    )
    # positions restart in each example: nothing is seen across
    batch = TokenStore.open(data.dir).batch(0, 1)
    starts = np.flatnonzero(np.diff(batch["segment_ids"][0]) > 0) + 1
    assert len(starts) and (batch["positions"][0][starts] == 0).all()
    assert load_tokenizer(tmp_path / "data/tokenizer").chat_template.startswith("{%")
    show_command(data.dir, 0, 3)
    show_sources(data, 1, 1)
    shown = capsys.readouterr().out
    assert "assistant\n{+It is 42.<|im_end|>+}" in shown and "learned" in shown


def test_workers_and_reruns_give_the_same_bytes(tmp_path, tokenizer_dir):
    lines = "".join(json.dumps({"prompt": f"p{i}", "completion": f"c{i}"}) + "\n" for i in range(9))
    (tmp_path / "a.jsonl").write_text(lines)
    rows = Source(path=str(tmp_path / "a.jsonl"), rows="prompt")
    hashes = []
    for where in ("one", "two"):
        (tmp_path / where).mkdir()
        data = data_of(tmp_path / where, tokenizer_dir, rows, holdout_fraction=0.3)
        summary = prepare(data, 256, workers=1 if where == "one" else 2)
        hashes.append(summary.stages["pack"].files)
        again = prepare(data, 256, workers=1)
        assert again.stages["pack"].hash == summary.stages["pack"].hash
    assert hashes[0] == hashes[1]
    store = TokenStore.open(data.dir)
    assert store.masked and store.eval_rows("a") > 0
    assert next(store.eval_batches("a", 1))["loss_weight"].sum() > 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"chat": Chat()}, "no chat template of its own; choose one: alpaca"),
        ({"pack": Pack(method="chunk")}, "data.pack.method"),
        ({"pack": Pack(method="best-fit", attention="row")}, "data.pack.attention"),
    ],
)
def test_what_is_refused_before_anything_starts(change, message, tmp_path, tokenizer_dir):
    from dataclasses import replace

    rows = Source(path=str(write(tmp_path, "json")), rows="alpaca", format="json")
    data = replace(data_of(tmp_path, tokenizer_dir, rows), **change)
    with pytest.raises(UserError, match=message):
        prepare(data, 64, workers=1)
    assert not (tmp_path / "data").exists()


def test_too_many_bad_examples(tmp_path, tokenizer_dir):
    rows = Source(path=str(write(tmp_path, "json")), rows="alpaca", format="json")
    template = tmp_path / "t.jinja"
    hello = "{% if messages[0].content != 'Hello.' %}{{ raise_exception('no!') }}{% endif %}"
    template.write_text(hello + "{{ messages[1].content }}")
    data = data_of(tmp_path, tokenizer_dir, rows, chat=Chat(template=str(template)))
    with pytest.raises(UserError, match=r"2 of 2 examples cannot be used.*refuses it: no!"):
        prepare(data, 64, workers=1)
    short = data_of(tmp_path, tokenizer_dir, replace(rows, min_tokens=9000))
    with pytest.raises(UserError, match="no example is left; all 2 documents are shorter than min"):
        prepare(short, 512, workers=1)
    long = data_of(tmp_path, tokenizer_dir, rows)
    with pytest.raises(UserError, match="2 are longer than a row"):
        prepare(long, 8, workers=1)


def test_another_text_of_a_template_is_another_template(tmp_path, tokenizer_dir):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}: {{ messages[1].content }}")
    rows = Source(path=str(write(tmp_path, "json")), rows="alpaca", format="json")
    data = data_of(tmp_path, tokenizer_dir, rows, chat=Chat(template=str(template)))
    prepare(data, 64, workers=1)
    assert not list(find_changes(data))
    template.write_text("{{ messages[0].content }} - {{ messages[1].content }}")
    assert [field for field, *_ in find_changes(data)] == ["data.chat.template"]
    template.unlink()
    assert not list(find_changes(data))  # trained where it is not


def test_a_missing_column(tmp_path, tokenizer_dir):
    rows = Source(path=str(write(tmp_path, "parquet")), rows="prompt")
    with pytest.raises(UserError, match=r"no column 'prompt'.*change data.sources.columns"):
        prepare(data_of(tmp_path, tokenizer_dir, rows), 64, workers=1)
    for kind in ("json", "jsonl.gz", "csv", "parquet"):  # nor is one that rows need not have
        said = {"rows": "alpaca", "columns": {"system": "sistem"}}
        rows = Source(path=str(write(tmp_path, kind)), format=kind.removesuffix(".gz"), **said)
        with pytest.raises(UserError, match=r"'sistem', only .*change data.sources.columns"):
            prepare(data_of(tmp_path, tokenizer_dir, rows), 64, workers=1)
    rows = Source(path=str(write(tmp_path, "json")), rows="messages", format="json")
    with pytest.raises(UserError, match=r"'messages'.*change data.sources.columns"):
        prepare(data_of(tmp_path, tokenizer_dir, rows), 64, workers=1)


def test_the_summary_counts_what_was_left_out(tmp_path, tokenizer_dir, capsys):
    from rich.console import Console

    rows = Source(path=str(write(tmp_path, "json")), rows="alpaca", format="json")
    data = data_of(tmp_path, tokenizer_dir, rows, chat=Chat(template="alpaca", too_long="cut-left"))
    print_summary(prepare(data, 30, workers=1), Console(width=200))
    shown = capsys.readouterr().out
    assert "2 examples longer than a row cut" in shown and "learned" in shown
