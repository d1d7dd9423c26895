"""Answered questions: windows and their answers as in transformers' example, and packed."""

import copy
import csv
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from lmwright.config.rows import refuse_sources
from lmwright.config.run import Normalize, Source
from lmwright.data.manifest import read_manifest
from lmwright.data.prepare import prepare
from lmwright.data.rows.record import unpack_rows
from lmwright.data.rows.show import show_command
from lmwright.data.rows.store import TokenStore
from lmwright.data.sources.file import Slice
from lmwright.data.sources.files import find_files
from lmwright.data.sources.read import read_rows
from lmwright.data.stale import refuse_stale
from lmwright.data.text.answered import answered_question
from lmwright.data.text.chat_render import UnusableError
from lmwright.data.tokens.answers import AnswerColumn, Windows, document_of, in_windows
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError
from lmwright.models.modernbert import ModernBert
from lmwright.objectives.answer_spans import Answer
from lmwright.objectives.mlm import Mlm
from tests.answered_run import ANSWER, PETS, ROWS, answered_run
from tests.labeled_run import SEQ_LEN, SIZES

MODEL = ModernBert(mlp_dim=24, **SIZES | {"num_kv_heads": 4})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return answered_run(tmp_path_factory.mktemp("answers"), MODEL)


@pytest.fixture(scope="module")
def tokenizer(run):
    return load_tokenizer(f"{run.data.dir}/tokenizer")


def features(tokenizer, row, window, overlap):
    """(ids, place of the first token of the answer, of the last one) of each window, by the steps
    of transformers' examples/pytorch/question-answering/run_qa.py."""
    fast = copy.deepcopy(tokenizer.plain)
    eos = tokenizer.backend.id_to_token(tokenizer.eos_id)
    fast.post_processor = TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B:1 {eos}:1", special_tokens=[(eos, tokenizer.eos_id)]
    )
    fast.enable_truncation(window, stride=overlap, strategy="only_second")
    encoding = fast.encode(row["question"], row["context"])
    for each in (encoding, *encoding.overflowing):
        answers = row["answers"]
        sides = each.sequence_ids
        first = sides.index(1)
        last = len(sides) - 1 - sides[::-1].index(1)
        place = 0, 0
        if answers["answer_start"]:
            start = answers["answer_start"][0]
            end = start + len(answers["text"][0])
            if each.offsets[first][0] <= start and each.offsets[last][1] >= end:
                while first <= last and each.offsets[first][0] <= start:
                    first += 1
                while each.offsets[last][1] >= end:
                    last -= 1
                place = first - 1, last + 1
        yield each.ids, *place


@pytest.mark.parametrize("window, overlap", [(32, 6), (30, 0), (40, 15), (500, 128)])
def test_windows_are_those_of_transformers(tokenizer, window, overlap):
    column = AnswerColumn(Windows(window, overlap), "texts")
    around = (), (tokenizer.eos_id,)
    several = 0
    for row in ROWS:
        source = Source(path="x.jsonl", rows="answered")
        ours = column.beside(tokenizer, answered_question(row, source), around)
        theirs = list(features(tokenizer, row, window, overlap))
        assert [ids.tolist() for ids, *_ in ours] == [ids for ids, *_ in theirs]
        several += len(ours) > 1
        if PETS[3] in row["context"]:
            continue  # their example starts at the last of the tokens of one character
        for (ids, marks, _), (_, first, last) in zip(ours, theirs, strict=True):
            assert np.flatnonzero(marks & 1).tolist() == [first]
            assert np.flatnonzero(marks & 2).tolist() == [last]
            begin = int(np.flatnonzero(marks & 4)[0])
            assert ids[begin - 1] == tokenizer.eos_id
    assert several > 40 if window < 100 else several == 0
    counts = column.counts()
    assert counts["questions"] == 60 and counts["without_answer"] == 12
    assert counts["cut"] == counts["widened"] == 0


def test_rows_hold_the_answers(run, tokenizer):
    """Every answer stands in a window of its question as it is, and windows without one have none;
    the counts are those of the rows."""
    store = TokenStore.open(run.data.dir)
    assert store.holds == "answered questions" and store.eval_sources == ("held",)
    batch = unpack_rows(store.records(0, store.epoch_rows))
    found, none = set(), 0
    for tokens, ids, weight in zip(
        batch["tokens"], batch["segment_ids"], batch["loss_weight"].astype(int), strict=True
    ):
        for document in range(1, ids.max() + 1):
            mine, marks = tokens[ids == document], weight[ids == document]
            (first,), (last,) = (np.flatnonzero(marks & bit) for bit in (1, 2))
            none += first == 0
            if first:
                (begin,) = np.flatnonzero(marks & 4)
                asked = tokenizer.decode(mine[: begin - 1].tolist())
                found.add((asked, tokenizer.decode(mine[first : last + 1].tolist()).strip()))
    wanted = {(row["question"], text) for row in ROWS[:-10] for text in row["answers"]["text"][:1]}
    counts = read_manifest(f"{run.data.dir}/tokenize").counts["sources"]["train"]["texts"]
    assert found <= wanted and 1 <= len(wanted - found) <= counts["in_no_window"]
    assert counts["questions"] == 50 and counts["windows_without"] == none
    held = store.eval_questions("held")
    assert [each["id"] for each in held] == [row["id"] for row in ROWS[-10:]]
    assert [each["answers"] for each in held] == [row["answers"]["text"] for row in ROWS[-10:]]
    assert all(name.startswith(("train/", "eval/")) for name, _ in read_manifest(
        f"{run.data.dir}/pack").files.items())  # fmt: skip


def test_rows_are_shown_with_their_answers(run, capsys):
    show_command(run.data.dir, count=40)
    shown = capsys.readouterr().out
    assert "'Who slept?<|endoftext|>': no answer" in shown
    assert any(f"'Who slept?<|endoftext|>': {pet!r}\n" in shown for pet in PETS)
    assert "{+cat+} slept" in shown


def in_squads_own_form(rows):
    paragraphs = [
        {"context": row["context"], "qas": [{
            "id": row["id"], "question": row["question"], "is_impossible": False,
            "answers": [{"text": t, "answer_start": s} for t, s in zip(
                row["answers"]["text"], row["answers"]["answer_start"], strict=True)]}]}
        for row in rows
    ]  # fmt: skip
    half = len(rows) // 2
    articles = [{"title": "a", "paragraphs": paragraphs[:half]},
                {"title": "b", "paragraphs": paragraphs[half:]}]  # fmt: skip
    return {"version": "v2.0", "data": articles}


def test_other_forms_give_the_same_rows(run, tmp_path):
    """SQuAD's own file, and parquet with other columns."""
    (tmp_path / "squad.json").write_text(json.dumps(in_squads_own_form(ROWS[:-10])))
    columns = {"question": "asked", "context": "text", "answers": "found"}
    renamed = [{columns.get(k, k): v for k, v in row.items()} for row in ROWS[:-10]]
    pq.write_table(pa.Table.from_pylist(renamed), tmp_path / "rows.parquet")
    wanted = TokenStore.open(run.data.dir)
    own, other = {"format": "json"}, {"columns": columns}
    for number, (name, more) in enumerate((("squad.json", own), ("rows.parquet", other))):
        source = Source(path=str(tmp_path / name), rows="answered", id_column="id", **more)
        tokenizer = replace(run.data.tokenizer, path=f"{run.data.dir}/tokenizer")
        tokenizer = replace(tokenizer, vocab_size=None, special_tokens=("<|endoftext|>",))
        data = replace(run.data, dir=str(tmp_path / str(number)), sources=(source,),
                       tokenizer=tokenizer)  # fmt: skip
        prepare(data, SEQ_LEN, windows=ANSWER.windows)
        store = TokenStore.open(data.dir)
        assert store.epoch_rows == wanted.epoch_rows
        ours, theirs = (np.sort(s.records(0, s.epoch_rows), axis=0) for s in (store, wanted))
        assert ours.tobytes() == theirs.tobytes()


SAID = {"question": "Who?", "context": "The d\u00f6g slept."}


@pytest.mark.parametrize(
    "row, said",
    [
        ({"answers": {"text": ["d\u00f6g"], "answer_start": [5]}},
         "'d\u00f6g', is not what 'context' has at character 5, '\u00f6g sl"),
        ({"answers": {"text": ["dog"], "answer_start": [-1]}}, "has at character -1"),
        ({"answers": {"text": ["dog"], "answer_start": [99]}}, "at character 99, ''"),
        ({"answers": {"text": ["dog"], "answer_start": []}}, "has no lists 'text' and"),
        ({"answers": {"text": ["dog"], "answer_start": ["4"]}}, "1 of 'answers' is not a whole n"),
        ({"answers": {"text": [" "], "answer_start": [3]}}, "1 of 'answers' is empty or not text"),
        ({"answers": "dog"}, "'answers' is not an object with 'text' and 'answer_start'"),
        ({"answers": ["dog"]}, "'answers' holds something other than objects"),
        ({"answers": None, "context": ""}, "'context' is empty"),
        ({"answers": None, "question": 3}, "'question' is not text"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(row, said):
    with pytest.raises(UnusableError, match=said):
        answered_question(SAID | row, Source(path="x.jsonl", rows="answered"))


def test_an_answer_at_a_wrong_place_is_named_with_its_row(tmp_path):
    rows = [*ROWS[:5], ROWS[6] | {"answers": {"text": ["cat"], "answer_start": [1]}}, *ROWS[6:]]
    with pytest.raises(
        UserError, match=r"the first: texts.jsonl:6 answer 1 of 'answers', 'cat', is not what"
    ):
        answered_run(tmp_path, MODEL, rows)
    bad = (tmp_path / "data" / "normalize" / "quarantine.jsonl").read_text()
    assert json.loads(bad)["line"] == 6


def test_what_lies_inside_tokens_is_widened_and_counted(tokenizer):
    column = AnswerColumn(Windows(32, 6), "texts")
    row = {"question": "Who?", "context": "It slept on mats", "answers": ["ep"], "starts": [5]}
    ((ids, marks, _),) = column.beside(tokenizer, row, ((), ()))
    first, last = (int(np.flatnonzero(marks & bit)[0]) for bit in (1, 2))
    text = tokenizer.decode(ids[first : last + 1].tolist())
    assert "ep" in text and text.strip() != "ep" and column.counts()["widened"] == 1


def test_a_long_question_leaves_half_of_a_window(tokenizer):
    windows, around = Windows(20, 4), ((), (tokenizer.eos_id,))
    made = in_windows(tokenizer, ["why " * 40], ["because " * 9], windows, around)[0]
    assert made.cut and len(made.question) == 9 and made.room == 9
    assert all(len(document_of(made, begin, around)[0]) <= 20 for begin in made.starts)


def test_other_windows_are_not_trained_on_in_silence(run, tmp_path):
    begun = replace(run, dir=str(tmp_path / "none"))
    refuse_stale(begun)
    other = replace(begun, objective=replace(ANSWER, window_tokens=24, window_overlap=6))
    with pytest.raises(UserError, match=r"objective.window_tokens is 32 there and 24 here; run"):
        refuse_stale(other)


def test_settings_that_do_not_fit(run, tmp_path):
    data = replace(run.data, dir=str(tmp_path / "data"))
    with pytest.raises(UserError, match=r"window_tokens: 32 are more than a row has, 20; use 20"):
        prepare(data, 20, windows=ANSWER.windows)
    with pytest.raises(UserError, match=r"normalize.unicode: 'nfc' would shift"):
        prepare(replace(data, normalize=Normalize(unicode="nfc")), SEQ_LEN, windows=ANSWER.windows)
    with pytest.raises(UserError, match=r"are \"answered\", which .*'mlm' .*; choose 'answer'$"):
        refuse_sources(replace(run, objective=Mlm()))
    other = replace(run.data.sources[0], rows="text", columns={})
    with pytest.raises(
        UserError, match=r"are \"text\", which .*, or sources of rows = \"answered\"$"
    ):
        refuse_sources(replace(run, data=replace(data, sources=(other,)), objective=Answer()))


ANSWERS = {"text": ["the mat", "mat"], "answer_start": [15, 19]}


@pytest.mark.parametrize(
    "cell, texts",
    [
        (json.dumps(ANSWERS), ANSWERS["text"]),
        (str(ANSWERS), ANSWERS["text"]),
        (str({name: np.array(value) for name, value in ANSWERS.items()}), ANSWERS["text"]),
        (str({"text": np.array([], object), "answer_start": np.array([], np.int32)}), []),
        ("", []),
    ],
)
def test_answers_in_a_cell_of_csv(tmp_path, cell, texts):
    """As `to_csv` of datasets and of pandas writes a column of dicts."""
    with open(tmp_path / "a.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["question", "context", "answers"])
        lines.writerow(["where?", "the cat sat on the mat", cell])
        lines.writerow(["where?", "the cat sat on the mat", "__import__('os').getcwd()"])
    source = Source(path=str(tmp_path / "a.csv"), rows="answered")
    row, bad = read_rows(Slice(find_files(source)[0]), source)
    assert json.loads(row.text)["answers"] == texts
    assert bad.reason == "'answers' is not an object with 'text' and 'answer_start'"
