"""Calls of tools are learned whole, or their conversation is refused with the reason."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers

from lmwright.config.run import Chat, Data, Normalize, Pack, Source, Tokenizer
from lmwright.data.prepare import prepare
from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_calls import quotes_arguments
from lmwright.data.text.chat_encode import ChatEncoder
from lmwright.data.text.chat_template import BUILT_IN, FOLDER, ChatTemplate
from lmwright.data.tokens.tokenizer import save_tokenizer
from lmwright.errors import UserError
from tests.data.chat_problem import chat_tokenizer

# Words of each part that no template writes by itself.
NAME, ARGUMENT, RESULT, ASKED, TOLD = "zqname", "zqcity", "zqsunny", "zqwhere", "zqtold"
CALL = {
    "type": "function",
    "id": "abcdefgh1",
    "function": {"name": NAME, "arguments": {"c": ARGUMENT}},
}
CALLING = [
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]
ANSWERED = [
    *CALLING,
    {"role": "tool", "content": RESULT, "name": NAME, "tool_call_id": "abcdefgh1"},
    {"role": "assistant", "content": TOLD},
]
TWO = [*ANSWERED, {"role": "user", "content": "More."}, *ANSWERED[1:]]
PARAMETERS = {"type": "object", "properties": {"c": {"type": "string", "description": "zqplace"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": NAME, "description": "zqgets", "parameters": PARAMETERS},
    }
]
# Mistral 7B v0.3's rules: roles alternate, where turns that call and results do not count.
MISTRAL = """{%- set ns = namespace(index=0) -%}
{%- set users = messages | selectattr("role", "equalto", "user") | list -%}
{%- for message in messages -%}
{%- if not (message.role == "tool" or message.tool_calls is defined) -%}
{%- if (message.role == "user") != (ns.index % 2 == 0) -%}
{{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") -}}
{%- endif -%}
{%- set ns.index = ns.index + 1 -%}
{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "user" -%}
{%- if tools is not none and message == users[-1] -%}
{{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" -}}
{%- endif -%}
{{- "[INST] " + message.content + "[/INST]" -}}
{%- elif message.tool_calls is defined -%}
{{- "[TOOL_CALLS] [" -}}
{%- for call in message.tool_calls -%}
{%- set out = call.function | tojson -%}
{{- out[:-1] + ', "id": "' + call.id + '"}' + ("]" + eos_token if loop.last else ", ") -}}
{%- endfor -%}
{%- elif message.role == "assistant" -%}
{{- " " + message.content | trim + eos_token -}}
{%- else -%}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' -}}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- endif -%}
{%- endfor -%}
"""
SPECIAL = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"]


@pytest.fixture(scope="module")
def tokenizer():
    made = chat_tokenizer()
    marks = [*SPECIAL, "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"]
    made.backend.add_special_tokens([tokenizers.AddedToken(m, special=True) for m in marks])
    return made


def learned(template, tokenizer, messages, **more):
    encoder = ChatEncoder(template, tokenizer, Chat(), 1 << 20, None)
    example = encoder.encode({"messages": messages, **more})
    return tokenizer.decode(example.ids[example.learned])


def rendered(source, messages, tools, roles):
    """What transformers makes of it; None where the template refuses it."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    try:
        texts, _ = utils.render_jinja_template(
            [messages], tools=tools, chat_template=source, **roles
        )
        return texts[0]
    except Exception:  # templates raise what they like
        return None


def templates():
    trl = find_spec("trl")  # importing it takes long
    if trl is None:
        pytest.skip("trl, which has copies of real templates, is absent")
    found = sorted((Path(trl.origin).parent / "chat_templates").glob("*.jinja"))
    found += [FOLDER / f"{name}.jinja" for name in BUILT_IN]
    assert len(found) > 30
    return {path.stem: path.read_text("utf-8") for path in found} | {"mistral": MISTRAL}


@pytest.mark.parametrize("messages", [CALLING, TWO], ids=["a call", "calls and results"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_what_transformers_does_not_write_is_refused_and_calls_are_learned(
    messages, tools, tokenizer
):
    roles = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
    texts = [part["function"]["name"] for part in tools or ()]
    calls = sum("tool_calls" in m for m in messages)
    accepted, refused = [], []
    for name, source in templates().items():
        if "strftime_now" in source and "date_string" not in source:
            continue  # today's date; below
        text = rendered(source, messages, tools, roles)
        template = ChatTemplate(source, tokenizer)
        more = {"tools": tools} if tools else {}
        if text is None:
            with pytest.raises(UnusableError):
                template.turns({"messages": messages, **more})
            continue
        whole = text.count(ARGUMENT) == calls and text.count(NAME) >= calls + len(texts)
        whole = whole and text.count(RESULT) == messages.count(ANSWERED[2])
        whole = whole and ("zqgets" in text or not tools)
        try:
            said = learned(template, tokenizer, messages, **more)
        except UnusableError as e:
            assert not whole, (name, e)
            refused.append(name)
            continue
        assert whole, name
        accepted.append(name)
        assert said.count(ARGUMENT) == calls and said.count(NAME) == calls, (name, said)
        assert said.count(TOLD) == messages.count(ANSWERED[3])
        for other in (ASKED, RESULT, "zqgets", "zqplace", "[TOOL_RESULTS]"):
            assert other not in said, (name, said)
    assert {"qwen3", "mistral", "llama3_1"} & set(accepted) >= {"qwen3", "mistral"}
    assert {"chatml", "llama3", "phi3", "gemma"} <= set(refused) | set(BUILT_IN)
    assert len(accepted) > 10 and len(refused) > 5


def test_the_reason_names_a_template_that_writes_calls(tokenizer):
    template = ChatTemplate((FOLDER / "chatml.jinja").read_text(), tokenizer)
    with pytest.raises(UnusableError, match=r"message 2: .* leaves out its tool call 1") as refusal:
        template.turns({"messages": CALLING})
    named = str(refusal.value).split("data.chat.template = ")[1].strip("'")
    writes = ChatTemplate((FOLDER / f"{named}.jinja").read_text(), tokenizer)
    assert NAME in learned(writes, tokenizer, CALLING, tools=TOOLS)
    with pytest.raises(UnusableError, match=r"the row: .* leaves out its tools"):
        template.turns({"messages": ANSWERED[::3], "tools": TOOLS})


@pytest.mark.parametrize(
    "call, says",
    [
        ({"name": NAME, "arguments": {"c": ARGUMENT}}, "leaves out its tool call 1"),
        ([CALL, CALL], "its tool call 2"),
        ({"function": {"name": NAME, "parameters": {}}}, "the arguments of"),
    ],
)
def test_a_call_that_is_written_in_part(call, says, tokenizer):
    one = "{% set c = m.tool_calls[0].function or {} %}{{ c.name }}({{ c.arguments | string }})"
    source = (
        "{% for m in messages %}<s>{% if m.tool_calls %}" + one + "{% else %}{{ m.content }}"
        "{% endif %}<|im_end|>{% endfor %}"
    )
    calls = call if isinstance(call, list) else [call]
    chat = [CALLING[0], {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(UnusableError, match=says):
        ChatTemplate(source, tokenizer).turns({"messages": chat})


def test_arguments_written_as_json_are_those_of_the_object(tokenizer):
    """As OpenAI's files have them; templates with `tojson` would teach a model to quote them."""
    roles = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
    function = {"name": NAME, "arguments": json.dumps({"c": ARGUMENT})}
    said = [CALLING[0], {**CALLING[1], "tool_calls": [CALL | {"function": function}]}]
    seen = 0
    for name, source in templates().items():
        text = rendered(source, CALLING, None, roles)
        if "strftime_now" in source or text is None or text.count(ARGUMENT) != 1:
            continue
        turns = ChatTemplate(source, tokenizer).turns({"messages": said})
        assert turns.text == text, name
        seen += rendered(source, said, None, roles) != text
    assert seen > 5
    call = "{{ c.function.name }}: {{ c.function.arguments }}"
    plain = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}" + call + "{% else %}"
        "{{ m.content }}{% endfor %}</s>{% endfor %}"
    )
    assert not quotes_arguments("no call", [{**said[1], "tool_calls": ["not a call", CALL]}])
    raw = ChatTemplate(plain, tokenizer).turns({"messages": said})  # which takes it as it is
    assert raw.text == f"{ASKED}</s>{NAME}: {function['arguments']}</s>"


@pytest.mark.parametrize(
    "more", [{"reasoning_content": "zqhmm"}, {"content": "<think>zqhmm</think>zqtold"}]
)
def test_thoughts_that_a_template_drops_are_refused(more, tokenizer):
    drops = "{% for m in messages %}<s>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    answer = {"role": "assistant", "content": TOLD, **more}
    said = [CALLING[0], answer]
    with pytest.raises(UnusableError, match=r"message 2: .* leaves out its thoughts"):
        ChatTemplate(drops, tokenizer).turns({"messages": said})
    without = {"messages": [CALLING[0], {**answer, "weight": 0}]}  # not learned anyway
    assert "zqhmm" not in ChatTemplate(drops, tokenizer).turns(without).text
    keeps = ChatTemplate((FOLDER / "qwen3.jinja").read_text(), tokenizer)
    assert "zqhmm" in learned(keeps, tokenizer, said)
    earlier = {"messages": [*said, *said]}  # of turns before the last, it drops them
    assert keeps.turns(earlier).text.count("zqhmm") == 1


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_before_a_call_are_those_of_transformers(key, tokenizer):
    """Under each name, also where a template reads another; gpt-oss's leaves them out."""
    said = [CALLING[0], {**CALLING[1], key: "zqhmm"}, *ANSWERED[2:]]
    roles = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
    for name, thinks in (("qwen3", 1), ("glm4moe", 1), ("lfm2_2_5", 1), ("gptoss", 0)):
        source, date = templates()[name], "2025-01-31"
        text = re.sub(r"(Current date: )\S+", rf"\g<1>{date}", rendered(source, said, None, roles))
        turns = ChatTemplate(source, tokenizer, date).turns({"messages": said})
        assert turns.text == text, name
        spoken = [turns.text[a:b] for a, b in turns.turns]
        assert [s.count("zqhmm") for s in spoken] == [thinks, 0] and text.count("zqhmm") == thinks
        assert ARGUMENT in spoken[0] and TOLD in spoken[1] and RESULT not in spoken[0]


def test_words_before_a_call_are_left_where_transformers_writes_them(tokenizer):
    """gpt-oss drops them once an answer follows, as it does thoughts; the call is learned."""
    said = [CALLING[0], {**CALLING[1], "content": "zqhmm"}, *ANSWERED[2:]]
    text = rendered(templates()["gptoss"], said, None, {})
    turns = ChatTemplate(templates()["gptoss"], tokenizer, "2025-01-31").turns({"messages": said})
    assert turns.text == re.sub(r"(Current date: )\S+", r"\g<1>2025-01-31", text)
    spoken = [turns.text[a:b] for a, b in turns.turns]
    assert "zqhmm" not in text and ARGUMENT in spoken[0] and RESULT not in spoken[0]
    assert TOLD in spoken[1] and len(spoken) == 2


def test_the_turns_of_mistral_begin_and_end_where_they_do(tokenizer):
    template = ChatTemplate(MISTRAL, tokenizer)
    found = template.turns({"messages": TWO, "tools": TOOLS})
    call = json.dumps([CALL["function"] | {"id": CALL["id"]}])
    wanted = [f"[TOOL_CALLS] {call}<|endoftext|>", f" {TOLD}<|endoftext|>"] * 2
    assert [found.text[a:b] for a, b in found.turns] == wanted


def test_templates_that_ask_for_the_date(tokenizer):
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    source = templates()["gptoss"]
    with pytest.raises(UnusableError, match=r"today's date; set data\.chat\.date"):
        ChatTemplate(source, tokenizer).turns({"messages": TWO})
    dated = ChatTemplate(source, tokenizer, "2025-01-31").turns({"messages": TWO, "tools": TOOLS})
    texts, _ = transformers.render_jinja_template([TWO], tools=TOOLS, chat_template=source)
    today = re.search(r"Current date: (\S+)", texts[0])[1]
    assert dated.text == texts[0].replace(today, "2025-01-31")
    said = [dated.text[a:b] for a, b in dated.turns]
    assert [s[s.rindex("<|") :] for s in said] == ["<|call|>", "<|end|>", "<|call|>", "<|return|>"]
    assert [NAME in s for s in said] == [True, False, True, False]


def data_of(folder, tokenizer, rows, chat):
    save_tokenizer(tokenizer, folder / "tokenizer")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1]))
    return Data(
        dir=str(folder / "data"),
        sources=(Source(path=str(folder / "rows.jsonl"), rows=rows[0]),),
        tokenizer=Tokenizer(path=str(folder / "tokenizer")),
        chat=chat,
        normalize=Normalize(max_bad_fraction=0.9),
        pack=Pack(method="best-fit"),
    )


def asked(*answer):
    return {"messages": [CALLING[0], *answer]}


ROUTES = {
    "messages": [asked(CALLING[1]), asked(ANSWERED[3])],
    "prompt": [
        {"prompt": CALLING[:1], "completion": CALLING[1:]},
        {"prompt": CALLING[:1], "completion": ANSWERED[3:]},
    ],
    "preference": [
        {"prompt": CALLING[:1], "chosen": ANSWERED[3:], "rejected": CALLING[1:]},
        {"prompt": ASKED, "chosen": "a", "rejected": "b"},
    ],
    "rated": [
        {"prompt": CALLING[:1], "completion": CALLING[1:], "label": True},
        {"prompt": ASKED, "completion": "b", "label": False},
    ],
}


@pytest.mark.parametrize("special_text", ["refuse", "parse"])
@pytest.mark.parametrize("rows", ROUTES)
def test_every_route_puts_such_a_row_aside(rows, special_text, tmp_path, tokenizer):
    chat = Chat(template="chatml", special_text=special_text)
    data = data_of(tmp_path, tokenizer, (rows, ROUTES[rows]), chat)
    summary = prepare(data, 512, workers=1)
    counts = summary.stages["tokenize"].counts["sources"]["train"]["rows"]
    assert (counts["docs"], counts["bad"]) == (1, 1)
    reason = json.loads((tmp_path / "data/tokenize/quarantine.jsonl").read_text())["reason"]
    assert "leaves out its tool call 1" in reason and "'qwen3'" in reason


def test_prepare_names_the_date_that_a_template_wants(tmp_path, tokenizer):
    (tmp_path / "t.jinja").write_text(
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    for date, wants in ((None, r"set data\.chat\.date"), ("2025-01-31", None)):
        chat = Chat(template=str(tmp_path / "t.jinja"), date=date)
        rows = [{"prompt": "a", "completion": "b"}]
        data = data_of(tmp_path, tokenizer, ("prompt", rows), chat)
        if wants is None:
            assert prepare(data, 64, workers=1).rows()[0]["docs"] == 1
            continue
        with pytest.raises(UserError, match=wants):
            prepare(data, 64, workers=1)
        assert not (tmp_path / "data").exists()
