"""Run files that `lmwright init` writes: the kind of rows is found by reading them, and the file is
one that prepares and trains."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from lmwright.cli import quickstart
from lmwright.cli.main import main
from lmwright.data.rows.store import TokenStore
from lmwright.formats.open import load_run
from lmwright.models.eurobert import EuroBert
from lmwright.models.llama import Llama
from lmwright.models.xlstm import Xlstm
from lmwright.program.lora import resolved
from tests.data.test_sources_hub import loopback
from tests.fake_hub import FakeHub
from tests.in_memory import export_hf
from tests.init_data import NAMES, WIDE, described, make_models, write
from tests.saved_run import weights_at

NARROW = WIDE | {"embed_dim": 8, "num_heads": 2, "head_dim": 6, "num_kv_heads": 1}
GATED = {
    "vocab_size": 320, "embed_dim": 64, "mlp_dim": 128, "num_layers": 1, "num_heads": 2,
    "key_dim": 16, "head_dim": 32, "seq_len": 400,
}  # fmt: skip
CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]
HUMAN = "\n\nHuman: q\n\nAssistant: {}"
OTHER = {"from": "gpt", "value": "You."}
ROWS = {
    "messages": ({"messages": CHAT}, "sft"),
    "sharegpt": ({"conversations": SHAREGPT}, "sft"),
    "alpaca": ({"instruction": "Say it.", "input": "", "output": "It."}, "sft"),
    "prompt": ({"prompt": "Who?", "completion": "Me."}, "sft"),
    "preference": ({"prompt": "Who?", "chosen": "Me.", "rejected": "You."}, "dpo"),
    "rated": ({"prompt": "Who?", "completion": "Me.", "label": True}, "kto"),
    "labeled": ({"text": "fine", "label": "good"}, "classify"),
    "related": ({"anchor": "Who?", "positive": "Me."}, "embed"),
    "tagged": ({"tokens": ["Ada", "slept"], "tags": ["B-PER", "O"]}, "tag"),
    "answered": (
        {"question": "Who?", "context": "Ada.", "answers": {"text": ["Ada"], "answer_start": [0]}},
        "answer",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ROWS)
def test_the_kind_of_rows_is_found(kind, models, here, capsys):
    row, objective = ROWS[kind]
    other = row | {"label": "bad"} if kind == "labeled" else row
    text = write(here / "rows.jsonl", other, {"a row": "of another kind"}, row)
    encodes = objective in ("classify", "embed", "tag", "answer")
    model = models / ("encoder" if encodes else "decoder")
    assert main(["init", "my.toml", text, "--model", str(model)]) == 0
    told = capsys.readouterr().out
    assert f"rows of {kind}" in told and "lmwright prepare my.toml" in told
    run = load_run("my.toml")
    assert run.objective.kind == objective and run.data.sources[0].rows == kind
    assert (run.lora is not None) == (objective in ("dpo", "kto"))
    if kind in ("labeled", "tagged"):
        assert run.objective.labels == {"labeled": ("bad", "good"), "tagged": ("O", "B-PER")}[kind]
    assert main(["init", "my.toml", text]) == 2  # is not replaced
    assert main(["init", "other.toml", text]) == 2
    assert "--model: missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "objective", "columns"),
    [
        (
            {"question": "Who?", "answer": "Me."}, "sft",
            {"prompt": "question", "completion": "answer"},
        ),
        (
            {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": OTHER}, "dpo",
            {"prompt": "conversations"},
        ),
        (
            {"instruction": "Sum up.", "context": "It.", "response": "It.", "category": "a"}, "sft",
            {"input": "context", "output": "response"},
        ),
        ({"System_Prompt": "s", "Question": "Who?", "Response": "Me."}, "sft",
         {"prompt": "Question", "completion": "Response", "system": "System_Prompt"}),
        ({"conversation": CHAT}, "sft", {"messages": "conversation"}),
        ({"chosen": CHAT, "rejected": [CHAT[0], {**CHAT[1], "content": "You."}]}, "dpo", {}),
        ({"chosen": HUMAN.format("a"), "rejected": HUMAN.format("b")}, "dpo", {}),
        ({"query": "q", "answer": "a"}, "sft", {"prompt": "query", "completion": "answer"}),
        ({"messages": CHAT, "label": True}, "kto", {"completion": "messages"}),
        ({"Sentence": "fine", "label": [1, 0], "idx": 1}, "multilabel", {"text": "Sentence"}),
        (
            {"premise": "fine", "hypothesis": "good", "label": 2.5}, "regress",
            {"text": "premise", "text_pair": "hypothesis"},
        ),
        (
            {"tokens": ["Ada", "ran"], "pos_tags": [1, 2], "ner_tags": [3, 0]}, "tag",
            {"tags": "ner_tags"},
        ),
        ({"tokens": ["Ada", "ran"], "pos": [1, 2], "upos": ["N", "V"]}, "tag", {"tags": "upos"}),
        ({"text": "fine", "label": ["a", "b"]}, "multilabel", {}),
        ({"text": "fine", "label": 2.5}, "regress", {}),
    ],
    ids=(
        "answer", "sharegpt", "dolly", "orca", "conversation", "trl", "hh", "query", "liked",
        "capital", "pair", "conll", "upos", "several", "number",
    ),
)  # fmt: skip
def test_other_names_and_labels(row, objective, columns, models, here):
    model = str(models / ("decoder" if objective in ("sft", "dpo", "kto") else "encoder"))
    assert main(["init", "my.toml", write(here / "a.json", row), "--model", model]) == 0
    run = load_run("my.toml")
    assert run.objective.kind == objective and run.data.sources[0].columns == columns
    (here / "list.json").write_text(json.dumps([row], indent=1))
    assert main(["init", "list.toml", str(here / "list.json"), "--model", model]) == 0
    assert load_run("list.toml").data.sources[0].format == "json"


def test_datasets_of_the_hub_need_no_column_text(models, here):
    pytest.importorskip("datasets")
    raw = io.BytesIO()
    pq.write_table(described([{"content": "a text", "label": 1}] * 3, label=NAMES), raw)
    with FakeHub("me/set", {"data/train-00000-of-00001.parquet": raw.getvalue()}) as hub:
        words = ["hf://datasets/me/set", "--model", str(models / "encoder")]
        subprocess.run(
            [sys.executable, "-m", "lmwright", "init", "my.toml", *words],
            env=os.environ | loopback(hub, here / "home"),
            check=True,
        )
    run = load_run("my.toml")
    assert run.data.sources[0].columns == {"text": "content"}
    assert run.objective.labels == ("loc", "PER")


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        ("encoder", "mlm"),
        ("decoder", "clm"),
        ("deberta-v3-xsmall", "mlm"),
        ("llada-8b", "diffusion"),
    ],
)
def test_texts_are_learned_as_the_model_reads(model, objective, models, here):
    (here / "text.txt").write_text("a line\n" * 9)
    name = str(models / model) if (models / model).exists() else model
    assert main(["init", "my.toml", "text.txt", "--model", name]) == 0
    assert load_run("my.toml").objective.kind == objective


def test_the_only_column_of_texts_is_the_text(here):
    for name, row in (("story", {"story": "a text"}), ("review", {"id": 1, "review": "a text"})):
        write(here / "a.jsonl", row)
        assert main(["init", "my.toml", "a.jsonl", "--overwrite"]) == 0
        assert load_run("my.toml").data.sources[0].text_column == name


def test_a_file_of_squad_holds_answered_questions(models, here):
    question = ROWS["answered"][0] | {"answers": [{"text": "Ada", "answer_start": 0}]}
    paragraphs = [{"context": question.pop("context"), "qas": [question] * 3}]
    (here / "a.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    assert main(["init", "my.toml", "a.json", "--model", str(models / "encoder")]) == 0
    source = load_run("my.toml").data.sources[0]
    assert (source.rows, source.format) == ("answered", "json")


@pytest.mark.parametrize("rows", [3, 400])
@pytest.mark.parametrize("kind", ["text", "labeled"])
def test_a_small_data_set_fills_its_batches(kind, rows, models, here, capsys):
    lines = [{"text": f"who are you, {i * i}? " * 4, "label": "ab"[i % 2]} for i in range(rows)]
    if kind == "text":
        lines = [{"text": line["text"]} for line in lines]
    model = models / ("decoder" if kind == "text" else "encoder")
    words = [write(here / "a.jsonl", *lines), "--model", str(model)]
    assert main(["init", "my.toml", *words]) == 0
    chips = int(capsys.readouterr().out.split("--on v5e-")[1].split()[0])
    assert main(["prepare", "my.toml", "data.holdout_fraction=0"]) == 0
    run = load_run("my.toml")
    batch = run.train.global_batch_size
    assert batch % chips == 0  # of what it advises
    TokenStore.open(run.data.dir).check_batch(batch)
    assert batch == 1 if rows == 3 else batch > 4


def test_where_no_file_can_be_made(here, capsys, monkeypatch):
    if not Path("/proc/self").exists():
        pytest.skip("the system has no folders of its own")
    (here / "a.txt").write_text("a text")
    assert main(["init", "/proc/my.toml", "a.txt"]) == 2
    assert "/proc/my.toml: cannot be written" in capsys.readouterr().err
    of_one = [("a.py", Path(__file__).read_text())]  # all of Python's take ten seconds
    monkeypatch.setattr(quickstart, "modules", lambda: of_one)
    assert main(["quickstart", "/proc/my"]) == 2
    assert "/proc/my: cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raw", "told"),
    [("caf\u00e9".encode("latin-1"), "invalid UTF-8 at byte 4; write"), (b" \n", "holds no text")],
)
def test_plain_text_is_read(raw, told, here, capsys):
    (here / "a.txt").write_bytes(raw)
    assert main(["init", "my.toml", "a.txt"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "format_"),
    [
        ({"notes.md": "some notes", "run.py": "print()"}, "txt"),
        ({"run.py": "print()" * 9, "package.json": '{"a": 1}'}, "txt"),
        ({"README.md": "Rows.", "a.json": '{"text": "a text"}\n'}, "jsonl"),
        ({"README.md": "Rows.", "train.json": '[{"text": "a text"}]', "test.json": "[]"}, "json"),
        ({"LICENSE.txt": "Terms.", "a.json": '{"text": "a text"}\n'}, "jsonl"),
        ({"LICENSE.txt": "Terms.", "a.md": "a text " * 9}, "txt"),
        ({"README.md": "Texts.", "a.txt": "a text " * 9}, "auto"),
        ({"photo.png": "no text"}, None),
    ],
)
def test_folders_whose_endings_do_not_tell_the_format(files, format_, here, capsys):
    (here / "there").mkdir()
    for name, text in files.items():
        (here / "there" / name).write_text(text)
        one = ["init", f"{name}.toml", f"there/{name}"]
        assert name.endswith(".json") or main(one) == (0 if format_ else 2)
    assert main(["init", "my.toml", "there"]) == (0 if format_ else 2)
    if format_:
        assert load_run("my.toml").data.sources[0].format == format_
    else:
        assert "only files of an unknown format (.png)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Sum up.", "input": "It.", "chosen": "It.", "rejected": "That."},
        {"question": "Who?", "A": "Me.", "B": "You.", "answer": "B"},
        {"question": "Who?", "passage": "I am.", "answer": "Me."},
    ],
)
def test_what_is_asked_is_not_read_in_part(row, models, here, capsys):
    words = [write(here / "a.jsonl", row), "--model", str(models / "decoder")]
    assert main(["init", "my.toml", *words]) == 2
    assert "its rows are of an unknown kind; name their columns" in capsys.readouterr().err


def test_conversations_in_tables_need_no_label(models, here):
    pq.write_table(pa.Table.from_pylist([ROWS["messages"][0]] * 3), here / "chats.parquet")
    (here / "alpaca.csv").write_text("instruction,input,output\nSay it.,,It.\n")
    for name, kind in (("chats.parquet", "messages"), ("alpaca.csv", "alpaca")):
        words = [name, "--model", str(models / "decoder"), "--overwrite"]
        assert main(["init", "my.toml", *words]) == 0
        assert load_run("my.toml").data.sources[0].rows == kind


def test_plain_texts_among_conversations_are_refused_by_name(models, here, capsys):
    (here / "mixed").mkdir()
    write(here / "mixed" / "chats.jsonl", *[ROWS["messages"][0]] * 40)
    (here / "mixed" / "notes.txt").write_text("some notes")
    assert main(["init", "my.toml", "mixed", "--model", str(models / "decoder")]) == 0
    assert main(["prepare", "my.toml", "data.workers=1"]) == 2
    assert "notes.txt: is plain text" in capsys.readouterr().err


def test_texts_prepare_and_train(here, capsys):
    (here / "a.csv").write_text('body\n"' + "the cat sat on the mat. " * 40 + '"\n')
    (here / "books").mkdir()
    for number in range(30):
        (here / "books" / f"{number}.txt").write_text(f"{number} the dog lay beside it. " * 40)
    assert main(["init", "my.toml", "a.csv", "books", "--model", "llama-5m"]) == 0
    assert load_run("my.toml").data.sources[0].text_column == "body"
    small = ["data.workers=1", "data.tokenizer.vocab_size=300", "model.vocab_size=300"]
    assert main(["prepare", "my.toml", *small]) == 0
    words = ["train.steps=1", "train.global_batch_size=8", "model.num_layers=1", "model.seq_len=64"]
    words += ["optim.schedule.warmup_steps=0", "model.embed_dim=32", "model.mlp_dim=32"]
    assert main(["prepare", "my.toml", *small, *words]) == 0
    assert main(["train", "my.toml", *small, *words]) == 0
    assert "done: 1 steps in runs/my" in capsys.readouterr().out


def test_a_base_model_gets_a_template_and_an_instruct_model_keeps_its_own(models, here):
    chats = write(here / "chats.jsonl", *[ROWS["messages"][0]] * 40)
    for name, template in (("decoder", "chatml"), ("instruct", "tokenizer")):
        model = here / name
        shutil.copytree(models / "decoder", model)
        if name == "instruct":
            (model / "chat_template.jinja").write_text("{{ messages }}")
        assert main(["init", f"{name}.toml", chats, "--model", str(model)]) == 0
        assert load_run(f"{name}.toml").data.chat.template == template
    assert main(["prepare", "decoder.toml", "data.workers=1"]) == 0


@pytest.mark.parametrize("rows", ["messages", "sharegpt"])
def test_conversations_with_tools_get_a_template_that_writes_them(rows, models, here):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    chats = write(here / "chats.jsonl", *[ROWS[rows][0] | {"tools": [tool]}] * 40)
    assert main(["init", "my.toml", chats, "--model", str(models / "decoder")]) == 0
    assert load_run("my.toml").data.chat.template == "qwen3"
    longer = ["data.pack.seq_len=640", "model.seq_len=640"]
    assert main(["prepare", "my.toml", "data.workers=1", *longer]) == 0


def test_texts_begin_as_those_of_the_model(models, here):
    shutil.copytree(models / "decoder", "model")
    backend = tokenizers.Tokenizer.from_file("model/tokenizer.json")
    first = "<|endoftext|>"
    backend.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
    )
    backend.save("model/tokenizer.json")
    (here / "a.txt").write_text("a text " * 999)
    chats = write(here / "a.jsonl", ROWS["messages"][0])
    for text, model, prepend in (
        ("a.txt", "model", "bos"), (chats, "model", "none"), ("a.txt", models / "decoder", "none"),
    ):  # fmt: skip
        assert main(["init", "my.toml", text, "--model", str(model), "--overwrite"]) == 0
        assert load_run("my.toml").data.tokenize.prepend == prepend


def test_windows_of_a_short_model_fit(models, here):
    model = EuroBert(**WIDE | {"seq_len": 40})
    export_hf(model, weights_at(1, model.spec()), models / "tokenizer", here / "model")
    words = [write(here / "a.jsonl", *[ROWS["answered"][0]] * 20), "--model"]
    for name, windows in (("model", (40, 13)), (str(models / "encoder"), (384, 128))):
        assert main(["init", "my.toml", *words, name, "--overwrite"]) == 0
        assert load_run("my.toml").objective.windows == windows


@pytest.mark.parametrize(
    ("model", "rank", "small"),
    [
        (Llama(**WIDE), 16, 8),
        (Llama(**NARROW), 8, 6),
        (Xlstm(**GATED), 16, 2),
    ],
    ids=("wide", "narrow", "gates"),
)
def test_adapters_have_ranks_that_the_model_takes(model, rank, small, models, here):
    export_hf(model, weights_at(1, model.spec()), models / "tokenizer", here / "model")
    words = [write(here / "a.jsonl", ROWS["messages"][0]), "--model", "model", "--lora"]
    assert main(["init", "my.toml", *words]) == 0
    run = load_run("my.toml")
    (adapter,) = resolved(run)
    ranks = {module.rank for module in adapter.modules}
    assert run.lora.rank == rank and ranks == {rank, small or rank}
    assert {module.scale for module in adapter.modules} == {2.0}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["my.txt", "rows.jsonl"], "my.txt: has to end in .toml"),
        (["no/my.toml", "rows.jsonl"], "no/my.toml: no is not a folder"),
        (["my.toml", ""], "TEXT: is empty"),
        (["my.toml", "liked.jsonl", "--model", "llama-5m"], "rows of alpaca have a label"),
        (["my.toml", "nothing"], "nothing does not exist"),
        (["my.toml", "odd.jsonl"], "no 'text', only 'a'"),
        (["my.toml", "rows.jsonl", "rated.jsonl"], "rows of rated and text cannot be in one run"),
        (["my.toml", "rated.jsonl", "--model", "llama-5m"], "llama-5m is a preset, whose weights"),
        (["my.toml", "rows.jsonl", "--model", "lama-5m"], "lama-5m"),
        (["my.toml", "rows.jsonl", "--rows", "messages"], "no 'messages'"),
        (
            ["my.toml", "one.jsonl", "--model", "encoder"],
            "one.jsonl: all first rows have the label 'good'",
        ),
        (["my.toml", "one.jsonl", "--model", "decoder"], "--model: decoder is a decoder (llama),"),
    ],
)
def test_what_cannot_be_written(words, told, here, models, capsys):
    for name in ("encoder", "decoder"):
        (here / name).symlink_to(models / name)
    write(here / "one.jsonl", ROWS["labeled"][0])
    write(here / "rows.jsonl", {"text": "a text"})
    write(here / "rated.jsonl", ROWS["rated"][0])
    write(here / "odd.jsonl", {"a": 1})
    write(here / "liked.jsonl", ROWS["alpaca"][0] | {"label": False})
    assert main(["init", *words]) == 2
    assert told in capsys.readouterr().err
    assert not [path for path in here.iterdir() if path.suffix == ".toml"]
