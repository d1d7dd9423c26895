"""Chat templates render as transformers does; what is learned is told letter by letter."""

import numpy as np
import pytest

from lmwright.config.run import Chat
from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_encode import ChatEncoder
from lmwright.data.text.chat_ends import answer_end
from lmwright.data.text.chat_template import BUILT_IN, FOLDER, ChatTemplate, template_source
from lmwright.data.tokens.tokenizer import save_tokenizer
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.errors import UserError
from tests.data.chat_problem import CHATS, TOOLS, chat_tokenizer

MARKED = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] | trim + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def reference(tokenizer, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, folder)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def built_in(name, tokenizer):
    return ChatTemplate(template_source(Chat(template=name), tokenizer), tokenizer)


def learned_text(template, messages, **more):
    turns = template.turns({"messages": messages, **more})
    return [turns.text[a:b] for a, b in turns.turns]


def accepts(template, messages):
    try:
        return template.render({"messages": messages})
    except UnusableError:
        return None


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_render_as_transformers_does(name, tokenizer, reference):
    template, done = built_in(name, tokenizer), 0
    for key, messages in CHATS.items():
        for prompt in (False, True):
            if accepts(template, messages) is None:
                with pytest.raises(Exception, match="role"):
                    reference.apply_chat_template(messages, chat_template=template.source)
                continue
            wanted = reference.apply_chat_template(
                messages,
                tools=TOOLS if key == "tools" else None,
                chat_template=template.source,
                add_generation_prompt=prompt,
                tokenize=False,
            )
            tools = {"tools": TOOLS} if key == "tools" else {}
            assert template.render({"messages": messages, **tools}, prompt=prompt) == wanted
            done += 1
    assert done >= 6


@pytest.mark.parametrize("name", ["smollm2", "llama3/tokenizer.model.tiktoken"])
def test_real_tokenizers_give_the_ids_of_transformers(name, shared_data, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = import_tokenizer(shared_data / "tokenizers" / name)
    save_tokenizer(tokenizer, tmp_path)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    choice = "tokenizer" if tokenizer.chat_template else "llama3"
    template = built_in(choice, tokenizer)
    for messages in (CHATS["one"], CHATS["system"], CHATS["turns"]):
        ours = ChatEncoder(template, tokenizer, Chat(), 999, None).encode({"messages": messages})
        wanted = reference.apply_chat_template(messages, chat_template=template.source)
        assert ours.ids.tolist() == list(wanted["input_ids"])


@pytest.mark.parametrize("key", ["one", "system", "turns"])
def test_masks_equal_those_of_transformers(key, tokenizer, reference):
    template = ChatTemplate(MARKED, tokenizer)
    ours = ChatEncoder(template, tokenizer, Chat(), 999, None).encode({"messages": CHATS[key]})
    wanted = reference.apply_chat_template(
        CHATS[key], chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ours.ids.tolist() == wanted["input_ids"]
    assert ours.learned.astype(int).tolist() == wanted["assistant_masks"]
    assert 0 < sum(wanted["assistant_masks"]) < len(ours.ids)
    # the same turns are found when nothing marks them
    bare = MARKED.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
    again = ChatEncoder(ChatTemplate(bare, tokenizer), tokenizer, Chat(), 999, None)
    assert again.encode({"messages": CHATS[key]}).learned.tolist() == ours.learned.tolist()


# As TRL's templates of Phi-3 and others: what ends an answer is marked apart, and so is the end of
# the text; what a model thinks first is marked in some turns alone.
BLOCKS = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- if loop.last %}{% generation %}{{ 'So: ' }}{% endgeneration %}{% endif %}
{%- generation %}{{ message['content'] | trim }}{% endgeneration %}{{ '\\n' }}
{%- generation %}{{ '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- generation %}{{ eos_token }}{% endgeneration %}"""


def test_a_turn_of_several_marked_blocks(tokenizer, reference):
    template, chat = ChatTemplate(BLOCKS, tokenizer), CHATS["turns"]
    make = lambda **said: ChatEncoder(template, tokenizer, Chat(**said), 999, None).encode  # noqa: E731
    wanted = reference.apply_chat_template(
        chat, chat_template=BLOCKS, return_dict=True, return_assistant_tokens_mask=True
    )
    text = lambda example: tokenizer.decode(example.ids[example.learned])  # noqa: E731
    whole = make()({"messages": chat})
    assert whole.learned.astype(int).tolist() == wanted["assistant_masks"]
    first, last = (
        "It is 42.<|im_end|>",
        "So: assistant\nXq5 \u00e9\U0001f600<|im_end|><|endoftext|>",
    )
    assert text(whole) == first + last
    assert text(make(train_on="last")({"messages": chat})) == last
    assert text(make()({"messages": chat, "liked": True})) == last  # KTO's
    assert text(make()({"messages": chat, "first": 2})) == last  # as in preferences
    light = [*chat[:1], chat[1] | {"weight": 0}, *chat[2:]]
    assert text(make()({"messages": light})) == last
    light = [*chat[:3], chat[3] | {"weight": 0}]
    assert text(make()({"messages": light})) == first
    assert answer_end(template, tokenizer)[0].startswith("<|im_end|>")


LEARNED = {
    ("alpaca", "one"): ["It is 42.<|endoftext|>"],
    ("chatml", "one"): ["It is 42.<|im_end|>"],
    ("chatml", "system"): ["  Hello <b>you</b>!\n<|im_end|>"],
    ("chatml", "turns"): ["It is 42.<|im_end|>", "assistant\nXq5 \u00e9\U0001f600<|im_end|>"],
    ("gemma", "turns"): ["It is 42.<end_of_turn>", "assistant\nXq5 \u00e9\U0001f600<end_of_turn>"],
    ("llama2", "system"): [" Hello <b>you</b>! <|endoftext|>"],
    ("llama3", "system"): ["Hello <b>you</b>!<|eot_id|>"],
    ("qwen3", "one"): ["<think>\n\n</think>\n\nIt is 42.<|im_end|>"],
    # the thoughts before the last question are not in the text, so they are not learned
    ("qwen3", "thoughts"): ["One<|im_end|>", "<think>\nhmm\n</think>\n\nTwo<|im_end|>"],
    ("qwen3", "tools"): [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nSunny.<|im_end|>",
    ],
    ("zephyr", "one"): ["It is 42.<|endoftext|>"],
}


@pytest.mark.parametrize("name, key", LEARNED)
def test_what_is_learned_of_each_template(name, key, tokenizer):
    assert learned_text(built_in(name, tokenizer), CHATS[key]) == LEARNED[name, key]


def test_the_tokens_learned_are_those_that_share_a_letter_with_the_answer(tokenizer):
    template = built_in("llama2", tokenizer)
    example = ChatEncoder(template, tokenizer, Chat(), 999, None).encode({"messages": CHATS["one"]})
    # a prompt ends before the blank, so that the blank is the model's
    assert tokenizer.decode(example.ids[example.learned]) == " It is 42. <|endoftext|>"
    turns = ChatEncoder(built_in("chatml", tokenizer), tokenizer, Chat(), 999, None)
    example = turns.encode({"messages": CHATS["turns"]})
    said = tokenizer.decode(example.ids[example.learned])
    assert said == "".join(LEARNED["chatml", "turns"])
    assert example.text_bytes == len(said.encode())


def test_only_the_last_turn(tokenizer):
    encoder = ChatEncoder(
        built_in("chatml", tokenizer), tokenizer, Chat(train_on="last"), 999, None
    )
    example = encoder.encode({"messages": CHATS["turns"]})
    assert tokenizer.decode(example.ids[example.learned]) == LEARNED["chatml", "turns"][1]


@pytest.mark.parametrize("name", ["chatml", "llama3", "llama2"])
@pytest.mark.parametrize("marked", [0, -1])
def test_a_turn_of_no_weight_is_read_and_not_learned(name, marked, tokenizer):
    """The others are learned as they are without it, and the end of a text with its last turn."""
    template, chat = built_in(name, tokenizer), CHATS["turns"]
    said = [i for i, m in enumerate(chat) if m["role"] == "assistant"]
    assert len(said) == 2
    light = [m | ({"weight": int(i != said[marked])} if i in said else {})
             for i, m in enumerate(chat)]  # fmt: skip
    make = ChatEncoder(template, tokenizer, Chat(), 999, tokenizer.eos_id).encode
    whole, found = make({"messages": chat}), make({"messages": light})
    alone = make({"messages": chat[: said[0] + 1]})  # the first turn
    assert found.ids.tolist() == whole.ids.tolist()
    first = np.arange(len(whole.ids)) < len(alone.ids)
    assert (found.learned == (whole.learned & (~first if marked == 0 else first))).all()
    assert 0 < found.learned.sum() < whole.learned.sum()
    with pytest.raises(UnusableError, match="leaves nothing to learn"):
        ChatEncoder(template, tokenizer, Chat(train_on="last"), 999, None).encode(
            {"messages": [m | {"weight": 0} for m in chat]}
        )


def test_a_prompt_of_messages_is_not_learned(tokenizer):
    template = built_in("chatml", tokenizer)
    assert learned_text(template, CHATS["turns"], first=2) == LEARNED["chatml", "turns"][1:]


def test_alpaca_with_and_without_an_input(tokenizer):
    template = built_in("alpaca", tokenizer)
    asked = {"role": "user", "content": "Add.\n\n1 2", "instruction": "Add.", "input": "1 2"}
    answer = {"role": "assistant", "content": "3"}
    assert template.render({"messages": [asked, answer]}) == (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<|endoftext|>"
    )
    asked = {"role": "user", "content": "Add.", "instruction": "Add.", "input": ""}
    assert template.render({"messages": [asked]}, prompt=True) == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nAdd.\n\n### Response:\n"
    )


def test_a_text_without_an_end_gets_one_that_is_learned(tokenizer):
    template = ChatTemplate(template_source(Chat(template="none"), tokenizer), tokenizer)
    example = ChatEncoder(template, tokenizer, Chat(), 999, 0).encode({"messages": CHATS["one"]})
    assert tokenizer.decode(example.ids) == "What is 6 times 7?It is 42.<|endoftext|>"
    assert tokenizer.decode(example.ids[example.learned]).endswith("42.<|endoftext|>")
    ended = ChatEncoder(built_in("alpaca", tokenizer), tokenizer, Chat(), 999, 0)
    assert ended.encode({"messages": CHATS["one"]}).ids.tolist().count(0) == 1


@pytest.mark.parametrize("too_long, kept", [("cut-left", slice(-9, None)), ("cut-right", slice(9))])
def test_long_examples(too_long, kept, tokenizer):
    template = built_in("chatml", tokenizer)
    whole = ChatEncoder(template, tokenizer, Chat(), 999, None).encode({"messages": CHATS["one"]})
    assert len(whole.ids) > 9
    encoder = ChatEncoder(template, tokenizer, Chat(too_long=too_long), 9, None)
    if not whole.learned[kept][1:].any():
        with pytest.raises(UnusableError, match=r"none of its .* tokens would be learned"):
            encoder.encode({"messages": CHATS["one"]})
        return
    cut = encoder.encode({"messages": CHATS["one"]})
    np.testing.assert_array_equal(cut.ids, whole.ids[kept])
    np.testing.assert_array_equal(cut.learned, whole.learned[kept])
    assert cut.cut
    dropped = ChatEncoder(template, tokenizer, Chat(), 9, None)
    assert dropped.encode({"messages": CHATS["one"]}) is None


@pytest.mark.parametrize(
    "messages, message",
    [
        ([*CHATS["one"], {"role": "assistant", "content": "x"}], "roles must alternate"),
        ([{"role": "user", "content": "<end_of_turn>"}, CHATS["one"][1]], "'<end_of_turn>'"),
    ],
)
def test_conversations_that_cannot_be_used(messages, message, tokenizer):
    encoder = ChatEncoder(built_in("gemma", tokenizer), tokenizer, Chat(), 999, None)
    with pytest.raises(UnusableError, match=message):
        encoder.encode({"messages": messages})


def test_special_text_may_be_parsed(tokenizer):
    chat = [{"role": "user", "content": "a<s>b"}, CHATS["one"][1]]
    template = built_in("chatml", tokenizer)
    example = ChatEncoder(template, tokenizer, Chat(special_text="parse"), 99, None)
    assert tokenizer.special_tokens["<s>"] in example.encode({"messages": chat}).ids


def test_a_template_that_says_nothing_of_the_assistant(tokenizer):
    encoder = ChatEncoder(ChatTemplate("hello", tokenizer), tokenizer, Chat(), 999, None)
    with pytest.raises(UnusableError, match="nothing to learn"):
        encoder.encode({"messages": CHATS["one"]})


def test_templates_are_sandboxed_and_know_no_clock(tokenizer):
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now('%d') }}",
        "{{ raise_exception('no') }}",
    ):
        with pytest.raises(UnusableError, match="refuses"):
            ChatTemplate(source, tokenizer).render({"messages": CHATS["one"]})
    dated = ChatTemplate("{{ strftime_now('%d %b %Y') }}", tokenizer, "2025-01-31")
    assert dated.render({"messages": CHATS["one"]}) == "31 Jan 2025"


def test_templates_that_are_not_there(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"no chat template.*alpaca, chatml, gemma.*Jinja file"):
        template_source(Chat(), tokenizer)
    with pytest.raises(UserError, match="cannot be read"):
        template_source(Chat(template=str(tmp_path / "none.jinja")), tokenizer)
    with pytest.raises(UserError, match="not a Jinja template"):
        ChatTemplate("{% for %}", tokenizer)
    assert set(BUILT_IN) == {"alpaca", "chatml", "gemma", "llama2", "llama3", "qwen3", "zephyr"}
    assert all((FOLDER / f"{name}.jinja").is_file() for name in BUILT_IN)
