"""Rated answers: the rating comes with its answer through the whole of prepare."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lmwright.config.run import Chat, Data, Pack, Source, Tokenizer
from lmwright.data.prepare import prepare
from lmwright.data.rows.show import show_command
from lmwright.data.rows.store import TokenStore
from lmwright.data.text.chat import UnusableError, conversation
from lmwright.data.tokens.tokenizer import load_tokenizer, save_tokenizer
from tests.data.chat_problem import chat_tokenizer

SOURCE = Source(path="x", rows="rated")


@pytest.mark.parametrize(
    "label, liked",
    [(True, True), (False, False), ("true", True), ("False", False), (1, True), ("0", False)],
)
def test_labels_of_every_format(label, liked):
    found = conversation({"prompt": "q", "completion": "a", "label": label}, SOURCE)
    assert found["liked"] is liked
    assert [m["content"] for m in found["messages"]] == ["q", "a"]


def test_a_prompt_within_the_completion_is_there_once():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    found = conversation({"prompt": "q", "completion": turns, "label": True}, SOURCE)
    assert conversation({"completion": turns, "label": True}, SOURCE) == found
    assert found["messages"] == turns and found["first"] == 1


@pytest.mark.parametrize("label", [None, "good", 2, ""])
def test_other_labels_are_refused(label):
    with pytest.raises(UnusableError, match="not true or false"):
        conversation(
            {"prompt": "q", "completion": "a", "thumb": label},
            Source(path="x", rows="rated", columns={"label": "thumb"}),
        )


@pytest.mark.parametrize("too_long", ["drop", "cut-left"])
def test_ratings_stay_with_their_answers(tmp_path, too_long, capsys):
    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")
    rows = [
        {"prompt": f"What {i}?", "completion": f"It is {i}." * (1 + i % 3), "label": i % 3 == 0}
        for i in range(20)
    ]
    if too_long == "cut-left":  # nothing but the answer is left, so its first token is "learned"
        rows.append({"prompt": "Much 99?", "completion": "It is 99. " * 40, "label": False})
    path = tmp_path / "rated.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(
        dir=str(tmp_path / "data"),
        sources=(Source(path=str(path), rows="rated"),),
        tokenizer=Tokenizer(path=str(tmp_path / "tokenizer")),
        chat=Chat(template="chatml", too_long=too_long),
        pack=Pack(method="best-fit"),
    )
    prepare(data, 160, workers=1)
    store = TokenStore.open(data.dir)
    assert store.rated and not store.pairs
    tokenizer = load_tokenizer(store.tokenizer_dir)
    seen = {}
    for row in range(store.epoch_rows):
        batch = {name: a[0] for name, a in store.batch(row, row + 1).items()}
        for segment in range(1, batch["segment_ids"].max() + 1):
            mine = np.flatnonzero(batch["segment_ids"] == segment)
            text = tokenizer.decode(batch["tokens"][mine].tolist())
            number = int(text.partition("It is ")[2].partition(".")[0])
            seen[number] = batch["loss_weight"][mine[0]]
            said = batch["tokens"][mine[1:]][batch["loss_weight"][mine[1:]] > 0]
            assert "What" not in tokenizer.decode(said.tolist())
    want = {i: float(i % 3 == 0) for i in range(20)} | ({99: 0.0} if too_long != "drop" else {})
    assert seen == want
    show_command(data.dir, 0, store.epoch_rows)
    shown = capsys.readouterr().out
    assert shown.count(", liked:") == 7 and shown.count(", not liked:") == len(want) - 7


def test_bytes_of_held_out_answers_are_those_of_the_liked_ones(tmp_path):
    """By these the loss, which is that of the liked answers, becomes bits per byte."""
    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")
    said = [(f"It is {i}." * (1 + i % 3), i % 2 == 0) for i in range(6)]
    rows = [{"prompt": "q", "completion": answer, "label": liked} for answer, liked in said]
    path = tmp_path / "rated.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source(path=str(path), rows="rated")
    data = Data(
        dir=str(tmp_path / "data"),
        sources=(source, replace(source, use="eval", name="held")),
        tokenizer=Tokenizer(path=str(tmp_path / "tokenizer")),
        chat=Chat(template="chatml"),
        pack=Pack(method="best-fit"),
    )
    prepare(data, 160, workers=1)
    (batch,) = TokenStore.open(data.dir).eval_batches("held", 8)
    assert batch["text_bytes"].sum() == sum(len(answer) for answer, liked in said if liked)
