"""Chat prompts: ids of transformers' template, and the end of an answer as a token or a text."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmwright.config.run import Tokenizer
from lmwright.data.text.chat_template import FOLDER, ChatTemplate
from lmwright.data.tokens.tokenizer import train_tokenizer
from lmwright.errors import UserError
from lmwright.evals import prompted
from lmwright.evals.chat_prompts import encode_chats, ending_answers
from lmwright.evals.generate import Generation
from lmwright.evals.sampling import Sampling
from lmwright.formats.tokenizer_files import open_tokenizer

PLAIN = train_tokenizer(["who are you? I am a model"] * 9, Tokenizer(vocab_size=280))


def test_a_prompt_is_that_of_transformers(shared_data):
    transformers = pytest.importorskip("transformers")
    folder = shared_data / "tokenizers" / "smollm2"
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), open_tokenizer(folder)
    template = ChatTemplate(ours.chat_template, ours)
    said = [{"role": "user", "content": "Who are you?"}]
    want = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    assert encode_chats(["Who are you?"], template, ours, "--prompt") == [want]
    settings, ends = ending_answers(Sampling(), template, ours)
    assert ends == (theirs.convert_tokens_to_ids("<|im_end|>"),) and settings == Sampling()


# Qwen's calls in short, and Mistral's question whether a message has any.
CALLS = """{% for m in messages %}{{ '<|im_start|>' + m.role }}
{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_keys_that_are_null_are_none_as_in_transformers(shared_data):
    """Tables fill in each key that any message has, and OpenAI's calls have no content."""
    transformers = pytest.importorskip("transformers")
    folder = shared_data / "tokenizers" / "smollm2"
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), open_tokenizer(folder)
    call = {"type": "function", "function": {"name": "sky", "arguments": {"at": None}}}
    said = [
        {"role": "user", "content": "Weather?", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": "sunny", "tool_calls": None, "name": "sky"},
    ]
    want = theirs.apply_chat_template(
        said, chat_template=CALLS, add_generation_prompt=True, return_dict=False
    )
    (ids,) = encode_chats([said], ChatTemplate(CALLS, ours), ours, "messages")
    assert ids == want and "None" not in ours.decode(ids) and '{"at": null}' in ours.decode(ids)


@pytest.mark.parametrize(
    ("name", "stop"), [("chatml", "<|im_end|>"), ("gemma", "<end_of_turn>"), ("zephyr", None)]
)
def test_an_answer_ends_where_the_template_goes_on(name, stop):
    """As a text, where the tokenizer has no such token; its own end is known anyway."""
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(), PLAIN)
    settings, ends = ending_answers(Sampling(stop=("x",)), template, PLAIN)
    if stop is None:
        assert ends == (PLAIN.eos_id,) and settings.stop == ("x",)
    else:
        assert ends == () and settings.stop == ("x", stop)


class Loaded:
    """Stands in for a model that was read."""

    model = SimpleNamespace(spec=dict, vocab_size=999, seq_len=999)
    path, tokenizer, num_devices = "here", PLAIN, 1
    prompt_prefix, end_ids = (), (3,)


def test_the_command_asks_in_the_template_and_shows_the_message(monkeypatch, capsys):
    asked = {}

    def answers(model, w, tokenizer, prompts, settings, compute, on_text, **options):
        asked.update(options, prompts=prompts, stop=settings.stop)
        on_text(0, "a model")
        return [Generation("a model", (1,), 1, "stop")]

    monkeypatch.setattr(prompted, "load_model", lambda *_, **__: Loaded)
    monkeypatch.setattr(prompted, "generate", answers)
    monkeypatch.setattr(prompted, "_print_speed", lambda *_: None)
    monkeypatch.setattr(prompted, "text_compute", lambda *_: None)
    monkeypatch.setattr(prompted, "weights_of", lambda *_: None)
    monkeypatch.setattr(prompted, "filling_for", lambda *_: None)
    with pytest.raises(UserError, match="here: its tokenizer has no chat template"):
        prompted.generate_command("x", ["who?"], chat=True)
    template = (FOLDER / "chatml.jinja").read_text()
    monkeypatch.setattr(Loaded, "tokenizer", replace(PLAIN, chat_template=template))
    prompted.generate_command("x", ["who?"], chat=True)
    assert capsys.readouterr().out == "who?\na model\n"
    [ids] = asked["prompts"]
    assert PLAIN.decode(ids) == "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"
    assert asked["end_ids"] == (3,) and asked["stop"] == ("<|im_end|>",)


def test_a_broken_template_is_that_of_the_model(monkeypatch):
    """Of a folder, which has no `data.chat.template`."""
    broken = replace(PLAIN, chat_template="{% for m in messages %}{{ m.x")
    monkeypatch.setattr(Loaded, "tokenizer", broken)
    monkeypatch.setattr(prompted, "load_model", lambda *_, **__: Loaded)
    monkeypatch.setattr(prompted, "text_compute", lambda *_: None)
    monkeypatch.setattr(prompted, "filling_for", lambda *_: None)
    with pytest.raises(UserError, match=r"^here: chat template: not a Jinja template"):
        prompted.generate_command("x", ["who?"], chat=True)
