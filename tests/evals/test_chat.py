"""Conversations: the ids of each turn are those of transformers' template, what does not fit is
forgotten from its beginning, an interrupted answer stays."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

import lmwright.api as lm
from lmwright.cli.main import main
from lmwright.evals import chat as module
from lmwright.evals.chat import Conversation
from lmwright.evals.generate import Generation
from lmwright.evals.prompt_rows import ContextFullError
from lmwright.evals.prompted import Asked, ask
from lmwright.evals.sampling import Sampling
from lmwright.formats.card import Facts
from lmwright.formats.loaded import LoadedModel
from lmwright.models.llama import Llama
from tests.in_memory import to_hf
from tests.saved_run import weights_at

MODEL = Llama(
    vocab_size=49152, embed_dim=16, mlp_dim=24, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, seq_len=160, head="tied",
)  # fmt: skip
SETTINGS = Sampling(max_new_tokens=6, temperature=1.0)
SYSTEM = "Answer in one word."


@pytest.fixture(scope="module")
def loaded(shared_data):
    folder = shared_data / "tokenizers" / "smollm2"
    tensors = to_hf(MODEL, weights_at(3, MODEL.spec()))
    return LoadedModel(MODEL, tensors, folder, Facts("x"), Path("here"))


@pytest.fixture
def seen(monkeypatch):
    """Ids of each turn."""
    turns = []

    def asked(*given, **options):
        made = ask(*given, **options)
        turns.append(made.prompts[0])
        return made

    monkeypatch.setattr(module, "ask", asked)
    return turns


def test_each_turn_is_that_of_transformers(loaded, seen):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(loaded.tokenizer_dir)
    talk = Conversation(loaded, SETTINGS, SYSTEM)
    told = [{"role": "system", "content": SYSTEM}]
    for message in ("Who are you?", "And <b>why</b>?"):
        said = []
        assert talk.answer(message, said.append) in ("length", "end")
        told += [{"role": "user", "content": message}]
        assert seen.pop() == theirs.apply_chat_template(
            told, add_generation_prompt=True, return_dict=False
        )
        told += [{"role": "assistant", "content": "".join(said)}]
    assert talk.messages == told[1:] and len(told) == 5
    (again,) = lm.generate(loaded, told[:-1], chat=True, max_new_tokens=6, temperature=1.0)
    assert again.text == told[-1]["content"]
    talk.forget()
    talk.answer("Who are you?", str)
    assert seen.pop() == theirs.apply_chat_template(
        told[:2], add_generation_prompt=True, return_dict=False
    )


HARMONY = (
    "{% for m in messages %}{% if '<|channel|>' in m['content'] %}{{ raise_exception('channels') }}"
    "{% endif %}<|start|>{{ m['role'] }}<|channel|>final<|message|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SPOKEN = (
    "<|channel|>analysis<|message|>He says hello.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Hello to you!"
)


@pytest.fixture
def in_channels(loaded, tmp_path, monkeypatch):
    """A model that thinks in a channel of its own, as gpt-oss does, before it answers."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(loaded.tokenizer_dir)
    theirs.add_special_tokens({"additional_special_tokens": [
        "<|start|>", "<|end|>", "<|channel|>", "<|message|>",
    ]})  # fmt: skip
    theirs.chat_template = HARMONY
    theirs.save_pretrained(tmp_path)
    model = replace(MODEL, vocab_size=49160, seq_len=320)
    tensors = to_hf(model, weights_at(3, model.spec()))
    other = LoadedModel(model, tensors, tmp_path, Facts("x"), Path("here"))
    ids = tuple(theirs(SPOKEN, add_special_tokens=False)["input_ids"])

    def texts(_asked, _weights, on_text):
        text = theirs.decode(ids, skip_special_tokens=True)
        on_text(0, text)
        return [Generation(text, ids, 1, "end")]

    monkeypatch.setattr(Asked, "texts", texts)
    return other, theirs


def test_thoughts_of_earlier_turns_are_left_out(in_channels, seen):
    """Their channels stayed in the history as text, without their special tokens."""
    loaded, theirs = in_channels
    talk = Conversation(loaded, SETTINGS, None)
    shown = []
    talk.answer("Hello.", shown.append)
    assert shown == ["analysisHe says hello.assistantfinalHello to you!"]
    told = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello to you!", "thinking": "He says hello."},
    ]
    assert talk.messages == told
    talk.answer("And?", str)
    told.append({"role": "user", "content": "And?"})
    assert seen[-1] == theirs.apply_chat_template(
        told, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [("analysisHe says", ""), ("analysisHe says hello.assistantfinalHello to", "Hello to")],
)
def test_what_an_interrupted_answer_has_said_is_kept(in_channels, monkeypatch, text, kept):
    def texts(_asked, _weights, on_text):
        on_text(0, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(Asked, "texts", texts)
    talk = Conversation(in_channels[0], SETTINGS, None)
    assert talk.answer("Hello.", str) == "interrupt"
    assert talk.messages[1] == {"role": "assistant", "content": kept}


def test_the_oldest_messages_are_forgotten(loaded, seen):
    talk = Conversation(loaded, SETTINGS, SYSTEM)
    for number in range(5):
        talk.answer(f"Question {number}: " + "why so? " * 8, str)
    assert all(len(ids) < MODEL.seq_len for ids in seen)
    assert talk.messages[0]["role"] == "user" and "Question 0" not in str(talk.messages)
    assert "Question 4" in talk.messages[-2]["content"]
    before = list(talk.messages)
    with pytest.raises(ContextFullError):
        talk.answer("why so? " * 99, str)
    assert talk.messages == before


def test_an_interrupted_answer_stays(loaded):
    talk = Conversation(loaded, SETTINGS, None)
    said = []

    def one_piece(text):
        said.append(text)
        raise KeyboardInterrupt

    assert talk.answer("Hello.", one_piece) == "interrupt"
    assert talk.messages[-1] == {"role": "assistant", "content": said[0]}


def test_the_command(loaded, monkeypatch, capsys):
    monkeypatch.setattr(module, "load_model", lambda *_, **__: loaded)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who are you?\n\n/new\nWho are you?\n"))
    words = ["chat", "here", "--max-new-tokens", "5", "--seed", "3"]
    assert main(words) == 0
    out = capsys.readouterr()
    first, second = out.out.splitlines()[0], out.out.splitlines()[-1]
    assert first == second and out.err.count("[ended by --max-new-tokens]") == 2
    plain = replace(loaded.tokenizer, chat_template=None)
    without = replace(loaded, kept={})
    without.__dict__["tokenizer"] = plain
    monkeypatch.setattr(module, "load_model", lambda *_, **__: without)
    assert main(words) == 2
    assert "here: its tokenizer has no chat template" in capsys.readouterr().err


def typed(monkeypatch, loaded, *lines):
    """Lines on a terminal, of which an exception is an interrupt."""
    given = iter(lines)

    def line(_prompt):
        said = next(given, EOFError())
        if isinstance(said, BaseException):
            raise said
        return said

    monkeypatch.setattr(module, "load_model", lambda *_, **__: loaded)
    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    return main(["chat", "here", "--max-new-tokens", "3"])


def test_a_message_that_is_no_text_does_not_end_a_conversation(loaded, monkeypatch, capsys):
    assert typed(monkeypatch, loaded, "Hi.", "a\udcffb", "And?") == 0
    told = capsys.readouterr().err
    assert told.count("is not UTF-8 text") == 1 and told.count("[ended by --max-new") == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("a\udcffb\n"))
    with pytest.raises(lm.UserError, match=r"prompts: .* is not UTF-8 text"):
        lm.generate(loaded, "a\udcffb")


def test_an_interrupt_at_the_prompt_keeps_the_conversation(loaded, monkeypatch, seen, capsys):
    assert typed(monkeypatch, loaded, "Hi.", KeyboardInterrupt(), "And?") == 0
    assert capsys.readouterr().err.count(module.HELP) == 2
    assert len(seen[-1]) > len(seen[-2])  # the first message is still there
