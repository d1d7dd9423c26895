"""`generate --prompts`: each row of a file gets the text of transformers."""

import csv
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.cli.main import main
from lmwright.core import copies
from lmwright.evals import prompts_file
from tests.evals.conftest import sentence

TEMPLATE = (
    "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NEW = ["--max-new-tokens", "16", "--precision", "fp32"]


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [sentence(rng, 25) for _ in range(40)]


@pytest.fixture(scope="module")
def texts(harness_folder, prompts):
    """Greedy text of transformers, one prompt at a time."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(harness_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(harness_folder)

    def text(ids):
        out = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0]
        return tokenizer.decode(out[len(ids) :], skip_special_tokens=True)

    return [text(tokenizer(prompt)["input_ids"]) for prompt in prompts]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(folder, file, out, *more):
    return main(["generate", str(folder), "--prompts", str(file), "--out", str(out), *NEW, *more])


def test_rows_get_the_texts_of_transformers(
    harness_folder, prompts, texts, tmp_path, monkeypatch, capsys
):
    """Of jsonl, with rows that have no prompt or one too long; on one device, on three that have
    all weights each, and on two that share them."""
    rows = [{"prompt": each, "n": n} for n, each in enumerate(prompts)]
    rows[3:3] = [{"prompt": 5, "n": "A1"}, {"prompt": "dog " * 400, "n": 99}]
    rows.append({"other": "x"})
    file, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert asked(harness_folder, file, out, "--id-column", "n") == 0
    said = capsys.readouterr()
    ended = "40 texts, ended 34 by length, 6 by end; 3 rows without one; 577 tokens"
    assert f"{out}: {ended}" in said.out
    found = lines_of(out)
    assert [line["row"] for line in found] == list(range(1, len(rows) + 1))
    assert found[3]["error"] == "'prompt' is a number, not text" and "text" not in found[3]
    assert found[3]["id"] == "A1" and "id" not in found[-1]  # which has none
    assert "the model's context is 320; shorten it" in found[4]["error"]
    assert found[-1]["error"] == "no 'prompt', only 'other'"
    good = [line for line in found if "text" in line]
    assert [line["text"] for line in good] == texts
    assert [line["prompt"] for line in good] == prompts
    assert [line["id"] for line in good] == [str(n) for n in range(40)]
    assert all((line["tokens"] == 16) == (line["finish"] == "length") for line in good)
    three = tmp_path / "3.jsonl"
    assert asked(harness_folder, file, three, "--devices", "3", "--id-column", "n") == 0
    assert three.read_bytes() == out.read_bytes()
    assert "on each of 3 devices" in capsys.readouterr().out
    monkeypatch.setattr(copies, "one_has_room", lambda *_: False)
    two = tmp_path / "2.jsonl"
    assert asked(harness_folder, file, two, "--devices", "2", "--id-column", "n") == 0
    assert two.read_bytes() == out.read_bytes()
    assert "over 2 devices" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["txt", "csv", "parquet"])
def test_files_of_other_forms(form, harness_folder, prompts, texts, tmp_path):
    file, out = tmp_path / f"p.{form}", tmp_path / "out.jsonl"
    few, more = prompts[:6], ["--prompt-column", "ask"]
    if form == "txt":
        file.write_text("\n".join(few) + "\n")
        more = []
    elif form == "csv":
        with file.open("w", newline="") as opened:
            csv.writer(opened).writerows([["ask"], *([each] for each in few)])
    else:
        pq.write_table(pa.table({"ask": few}), file)
    assert asked(harness_folder, file, out, *more) == 0
    assert [line["text"] for line in lines_of(out)] == texts[:6]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_conversations(form, harness_folder, tmp_path, capsys):
    """Messages of users, and lists of messages, whose answers are put behind them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shutil.copytree(harness_folder, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    talks = [
        [{"role": "user", "content": "the dog"}],
        [{"role": "system", "content": "rain"}, {"role": "user", "content": "water fell"},
         {"role": "assistant", "content": "a tap"}, {"role": "user", "content": "man"}],
    ]  # fmt: skip
    rows = [{"messages": talk} for talk in talks]
    file, out = tmp_path / f"talks.{form}", tmp_path / "out.jsonl"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        rows += [
            {"messages": [{"role": "user", "content": "no"}]},
            {"messages": []},
            {"messages": talks[1][:3]},
            {"messages": ["x"]},
        ]
        rows.append({"messages": "the dog"})  # a user's message alone
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert asked(folder, file, out, "--chat") == 0
    found = lines_of(out)
    for line, talk in zip(found[:2], talks, strict=True):
        ids = tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        made = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
        answer = {"role": "assistant", "content": tokenizer.decode(made, skip_special_tokens=True)}
        assert line["messages"] == [*talk, answer]
    if form == "jsonl":
        assert "not that" in found[2]["error"]
        assert "no list of messages" in found[3]["error"]
        assert "the last message is the assistant's" in found[4]["error"]
        assert "no list of messages" in found[5]["error"]
        assert found[6]["messages"] == found[0]["messages"]
        assert asked(folder, file, out, "--prompt-column", "messages", "--overwrite") == 0
        assert lines_of(out)[0]["error"] == "a list of messages; give --chat"
        assert "1 texts" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_the_assistant_has_the_tools_of_a_row(form, harness_folder, tmp_path):
    """They were left out without a word; a template that leaves them out makes a bad row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shutil.copytree(harness_folder, tmp_path / "chat")
    template = "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}" + TEMPLATE
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tools = [{"type": "function", "function": {"name": "weather"}}]
    talk = [{"role": "user", "content": "the dog"}]
    rows = [{"messages": talk}, {"messages": talk, "tools": tools}]
    file, out = tmp_path / f"talks.{form}", tmp_path / "out.jsonl"
    if form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows[::-1]), file)
    else:
        cells = [["prompt", "tools"], ["the dog", ""], ["the dog", json.dumps(tools)]]
        with file.open("w", newline="") as opened:
            csv.writer(opened).writerows([*cells, ["the dog", "a hammer"]])
    assert asked(folder, file, out, "--chat") == 0
    found = lines_of(out)
    if form == "csv":
        assert "'tools' is text, but not JSON" in found.pop()["error"]
    found.sort(key=lambda line: "tools" in line)
    assert ["tools" in line for line in found] == [False, True]
    for line in found:
        ids = tokenizer.apply_chat_template(
            talk, tools=line.get("tools"), add_generation_prompt=True, return_tensors="pt",
            return_dict=True,
        )["input_ids"]  # fmt: skip
        made = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(made, skip_special_tokens=True)
        assert line["messages"] == [*talk, {"role": "assistant", "content": text}]
    assert found[0]["messages"] != found[1]["messages"]
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert asked(folder, file, out, "--chat", "--overwrite") == 0
    assert any("leaves out its tools" in line.get("error", "") for line in lines_of(out))


def test_an_interrupted_command_goes_on(harness_folder, prompts, tmp_path, monkeypatch, capsys):
    """With the same draws, whatever was beside a row, and where the file was only touched."""
    file, out = tmp_path / "p.txt", tmp_path / "out.jsonl"
    file.write_text("\n".join(prompts) + "\n")
    words = ["--temperature", "0.8", "--seed", "4"]
    assert asked(harness_folder, file, tmp_path / "whole.jsonl", *words) == 0
    whole = prompts_file.Writer.lines

    def broken(*args):
        for number, lines in enumerate(whole(*args)):
            if number == 9:
                yield ['{"row": 10, "id']
                raise KeyboardInterrupt
            yield lines

    monkeypatch.setattr(prompts_file.Writer, "lines", broken)
    assert asked(harness_folder, file, out, *words) == 130
    assert not out.exists()
    monkeypatch.setattr(prompts_file.Writer, "lines", whole)
    capsys.readouterr()
    assert asked(harness_folder, file, out, *words[:2], "--seed", "5") == 2
    said = capsys.readouterr().err
    assert "out.jsonl.part: holds finished lines, made with other settings (seed); repeat" in said
    file.touch()
    assert asked(harness_folder, file, out, *words) == 0
    assert "9 rows were there; 40 texts" in capsys.readouterr().out
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.part*"))


def test_what_is_refused(harness_folder, tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    file.write_text('{"question": "x"}\n')

    def says(*words):
        assert main(["generate", str(harness_folder), *words]) == 2
        return capsys.readouterr().err

    assert "--prompt and --prompts are missing; give one of them" in says()
    assert "are there both" in says("--prompt", "x", "--prompts", str(file))
    assert says("--prompts", "x.txt", "--out", "texts.txt") == (
        "lmwright: error: --out: texts.txt is for JSON lines, and does not end in .jsonl; add it\n"
    )
    assert "--out needs --prompts" in says("--prompt", "x", "--out", "y.jsonl")
    assert "--overwrite needs --prompts" in says("--prompt", "x", "--overwrite")
    assert "has 'prompt'; no 'prompt', only 'question'; change --prompt-column" in says(
        "--prompts", str(file)
    )
    assert "nowhere.jsonl does not exist" in says("--prompts", "nowhere.jsonl")
    assert "has no chat template; continue texts by `lmwright generate` without --chat" in says(
        "--prompts", str(file), "--chat"
    )
    lines = tmp_path / "lines.txt"
    lines.write_text("the man\n")
    for option in ("--prompt-column", "--id-column"):
        assert f"{option}: no effect on" in says("--prompts", str(lines), option, "text")
    file.write_text('{"prompt": "x", "id": 1}\n[1]\n{"prompt": null, "id": 2}\nno json\n')
    assert "has 'nope'; no 'nope', only 'prompt', 'id'; change --id-column" in says(
        "--prompts", str(file), "--id-column", "nope"
    )
    assert "--top-k, --top-p: have no effect" in says("--prompts", str(file), "--top-k", "3")
    assert not list(tmp_path.glob("*.part*"))
