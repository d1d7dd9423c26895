"""Preferences: two conversations of one example stay together, chosen first."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lmwright.config.run import Chat, Data, Pack, Source, Tokenizer
from lmwright.data.prepare import prepare
from lmwright.data.rows.record import unpack_rows
from lmwright.data.rows.store import TokenStore
from lmwright.data.text.chat import UnusableError, conversation
from lmwright.data.text.chat_encode import BEGINS, LEARNED, ChatEncoder, Example
from lmwright.data.tokens.tokenizer import load_tokenizer, save_tokenizer
from lmwright.errors import UserError
from tests.data.chat_problem import chat_tokenizer

SOURCE = Source(path="x", rows="preference")
HUMAN = "\n\nHuman: q\n\nAssistant:"


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(chat_tokenizer(), folder)
    return folder


def said(*words):
    roles = ("user", "assistant") * len(words)
    return [{"role": r, "content": w} for r, w in zip(roles, words, strict=False)]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": said("q"), "chosen": said("", "a")[1:], "rejected": said("", "b")[1:]},
        {
            "prompt": json.dumps([{"from": "human", "value": "q"}]),
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {"prompt": "q", "chosen": said("q", "a"), "rejected": said("q", "b")},  # UltraFeedback
        {"prompt": said("q"), "chosen": said("q", "a"), "rejected": said("q", "b")},
        {"chosen": said("q", "a"), "rejected": said("q", "b")},  # as in trl, without a prompt
        {"chosen": f"{HUMAN} a", "rejected": f"{HUMAN} b\n"},  # HH-RLHF
        {"prompt": HUMAN, "chosen": "a", "rejected": "b"},
    ],
)
def test_every_form(row):
    assert conversation(row, SOURCE) == {
        "messages": said("q", "a"), "rejected": said("q", "b"), "first": 1,
    }  # fmt: skip


@pytest.mark.parametrize("answer", ['{"name": "Ada"}', "[1, 2]", '[{"a": 1}]', "[]", "{a"])
def test_an_answer_in_json_is_what_was_said(answer):
    row = {"prompt": '{"ask": 1}', "chosen": answer, "rejected": "no"}
    messages = [m["content"] for m in conversation(row, SOURCE)["messages"]]
    assert messages == ['{"ask": 1}', answer]


def test_a_prompt_within_its_answers_is_taken_as_trl_takes_it():
    """What both begin with is not learned, be it more than the prompt."""
    data = pytest.importorskip("trl.data_utils")
    system = [{"role": "system", "content": "s"}]
    row = {
        "prompt": "q", "chosen": system + said("q", "x", "p", "a"),
        "rejected": system + said("q", "x", "p", "b"),
    }  # fmt: skip
    theirs, found = data.maybe_extract_prompt(dict(row)), conversation(row, SOURCE)
    assert found["messages"] == theirs["prompt"] + theirs["chosen"]
    assert found["rejected"] == theirs["prompt"] + theirs["rejected"]
    assert found["first"] == len(theirs["prompt"]) == 4
    with pytest.raises(UnusableError, match="begins with a turn of the system, and 'prompt' is"):
        conversation(row | {"prompt": "other"}, SOURCE)


def test_a_system_prompt_goes_before_both():
    row = {"prompt": "q", "chosen": "[a", "rejected": "b", "system": "s"}
    found = conversation(row, SOURCE)
    assert found["first"] == 2 and found["messages"][-1]["content"] == "[a"
    assert {found[k][0]["content"] for k in ("messages", "rejected")} == {"s"}


@pytest.mark.parametrize(
    "row, says",
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same"),
        ({"prompt": "q", "chosen": " ", "rejected": "a"}, "'chosen' is empty"),
        (
            {"chosen": "a", "rejected": "b"},
            "there is no 'prompt', which columns.prompt names, and an answer is not a conversation",
        ),
        ({"chosen": said("q", "a"), "rejected": said("p", "b")}, "answer different prompts"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "'rejected'"),
        ({"prompt": "q", "chosen": ["a"], "rejected": "b"}, "not text, a message or a list"),
    ],
)
def test_unusable(row, says):
    with pytest.raises(UnusableError, match=says):
        conversation(row, SOURCE)


def data_of(tmp_path, tokenizer_dir, rows, **chat):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(
        dir=str(tmp_path / "data"),
        sources=(Source(path=str(path), rows="preference"),),
        tokenizer=Tokenizer(path=str(tokenizer_dir)),
        chat=Chat(template="chatml", **chat),
        pack=Pack(method="best-fit"),
    )


def pieces(data):
    """(text, what of it is learned) of each segment, row by row."""
    store = TokenStore.open(data.dir)
    assert store.pairs and store.masked
    tokenizer = load_tokenizer(store.tokenizer_dir)
    for record in store.records(0, store.epoch_rows):
        row = {name: array[0] for name, array in unpack_rows(record[None]).items()}
        found = []
        for segment in range(1, row["segment_ids"].max() + 1):
            mine = row["segment_ids"] == segment
            assert row["positions"][mine].tolist() == list(range(mine.sum()))
            learned = row["tokens"][mine & (row["loss_weight"] > 0)]
            found.append((tokenizer.decode(row["tokens"][mine].tolist()),
                          tokenizer.decode(learned.tolist())))  # fmt: skip
        yield found


def test_pairs_are_packed_whole_and_in_order(tmp_path, tokenizer_dir):
    rows = [
        {"prompt": f"What {i}?", "chosen": f"It is {i}." * (1 + i % 3), "rejected": f"No {i}"}
        for i in range(12)
    ]
    data = data_of(tmp_path, tokenizer_dir, rows)
    prepare(data, 160, workers=1)
    seen = {}
    for row in pieces(data):
        assert len(row) % 2 == 0
        for (chosen, yes), (rejected, no) in zip(row[::2], row[1::2], strict=True):
            asked = chosen.partition("?")[0].rpartition(" ")[2]
            assert f"What {asked}?" in chosen and f"What {asked}?" in rejected
            seen[int(asked)] = (yes, no)
    assert len(seen) == 12
    for i, (yes, no) in seen.items():
        assert f"It is {i}." * (1 + i % 3) in yes and f"No {i}" in no
        assert "What" not in yes + no


def test_bytes_of_held_out_pairs_are_those_of_the_chosen_answers(tmp_path, tokenizer_dir):
    """By these the loss, which is that of the chosen answers, becomes bits per byte."""
    chosen = [f"It is {i}." * (1 + i % 3) for i in range(6)]
    rows = [{"prompt": "q", "chosen": answer, "rejected": "No"} for answer in chosen]
    data = data_of(tmp_path, tokenizer_dir, rows)
    (source,) = data.sources
    prepare(replace(data, sources=(source, replace(source, use="eval", name="held"))), 160)
    (batch,) = TokenStore.open(data.dir).eval_batches("held", 8)
    assert batch["text_bytes"].sum() == sum(map(len, chosen))  # none of markers


def test_too_long_pairs(tmp_path, tokenizer_dir):
    rows = [{"prompt": "q", "chosen": "abc " * 60, "rejected": "b"},
            {"prompt": "q", "chosen": "a", "rejected": "b"}]  # fmt: skip
    data = data_of(tmp_path, tokenizer_dir, rows)
    prepare(data, 100, workers=1)
    assert [len(row) for row in pieces(data)] == [2]
    cut = data_of(tmp_path, tokenizer_dir, rows, too_long="cut-right")
    prepare(cut, 100, workers=1)
    assert sum(len(row) for row in pieces(cut)) == 4


def test_pairs_and_other_rows_do_not_mix(tmp_path):
    from lmwright.formats.open import load_run

    (tmp_path / "run.toml").write_text(
        'recipe = "quickstart"\nname = "x"\ndir = "x"\n[data]\ndir = "d"\n'
        'sources = [{path = "a", rows = "preference"}, {path = "b"}]\n'
    )
    with pytest.raises(UserError, match="pairs of answers"):
        load_run(tmp_path / "run.toml")


@pytest.mark.parametrize(
    "sizes, too_long, ids, cut",
    [
        ((4, 6), "drop", ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5]), False),  # a row of ten tokens
        ((4, 7), "drop", None, False),
        ((7, 4), "drop", None, False),
        ((4, 7), "cut-right", ([0, 1, 2, 3], [0, 1, 2, 3, 4]), True),
        ((7, 4), "cut-left", ([2, 3, 4, 5, 6], [0, 1, 2, 3]), True),
    ],
)
def test_each_answer_of_a_pair_has_half_of_a_row(sizes, too_long, ids, cut):
    """Where both do not fit; without one of them there is no pair."""

    def whole(chat):
        size = len(chat["messages"])
        return Example(np.arange(size), np.arange(size) > 0, text_bytes=10 * (size - 1))

    encoder = object.__new__(ChatEncoder)
    encoder.chat, encoder.seq_len, encoder._whole = Chat(too_long=too_long), 10, whole
    chosen, rejected = (["message"] * size for size in sizes)
    found, needed = encoder.encode_sized({"messages": chosen, "rejected": rejected})
    assert needed == sum(sizes)
    if ids is None:
        assert found is None
        return
    assert found.ids.tolist() == [*ids[0], *ids[1]] and found.cut == cut
    assert (found.marks & BEGINS).nonzero()[0].tolist() == [len(ids[0])]
    np.testing.assert_array_equal(found.marks & LEARNED, found.learned)
    assert found.text_bytes == 10 * found.learned.sum()
