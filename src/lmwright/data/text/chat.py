"""Chat: rows of every usual fine-tuning format, converted to one form of conversation.

    alpaca    instruction, input, output [, system]
    prompt    prompt, completion [, system]: texts, or lists of messages
    messages  messages: [{role, content}] [, tools]
    sharegpt  conversations: [{from, value}] [, system, tools]
    preference  [prompt,] chosen, rejected [, system, tools]: texts, messages, or lists of them
    rated     [prompt,] completion, label [, system, tools]: the same
                                  |
                                  v
    {"messages": [{"role": ..., "content": ...}, ...], "tools": [...], "first": 1}

`first` is the first message that may be learned, where what is before it is a prompt. An
Alpaca row's user message also keeps `instruction` and `input`, for templates that set them
apart. Of a preference, `messages` end in the answer that was chosen, `rejected` in the other.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from lmwright.config.rows import ROW_PARTS
from lmwright.config.run import Source
from lmwright.data.text.cells import not_json, refuse_printed_messages
from lmwright.data.text.chat_render import UnusableError
from lmwright.data.text.labeled import texts_of

_LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}

ROLES = ("system", "user", "assistant", "tool")

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}

SPEAKERS = ("role", "from", "content", "speaker")
"""Keys of which a message has one, whatever the others are called."""
MEDIA = {"<image>", "<video>", "<audio>"}
"""First or last line of what is said about something that is no text, as LLaVA's data have it."""
SAID = re.compile(r"\n\n(Human|Assistant):")
"""Begin of a turn in a conversation that is one text."""


def example_columns(source: Source) -> list[dict[str, str]]:
    """Columns of a source of examples by what they hold: the required ones, the optional ones, and
    the keys of messages."""
    return [
        {name: source.columns.get(name, name) for name in names} for names in ROW_PARTS[source.rows]
    ]


def conversation(row: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Conversation of a row. Raises UnusableError for a part that is missing, of another type or
    empty, for an unknown role, and if the assistant says nothing."""
    required, optional, keys = example_columns(source)
    columns = required | optional | keys
    parts = {name: row.get(column) for name, column in columns.items()}
    if source.rows == "alpaca":
        made = _alpaca(parts, columns)
    elif source.rows == "prompt":
        made = _prompt(parts, columns, source)
    elif source.rows == "preference":
        made = _preference(parts, columns, source)
    elif source.rows == "rated":
        made = _read_rated(parts, columns, source)
    else:
        chat = "messages" if source.rows == "messages" else "conversations"
        made = {"messages": _messages(parts[chat], columns, columns[chat], source)}
    if system := _text(parts.get("system"), columns.get("system", ""), empty="allowed"):
        for name in {"messages", "rejected"} & set(made):
            made[name].insert(0, {"role": "system", "content": system})
        if "first" in made:
            made["first"] += 1
    if tools := parse_cell(parts.get("tools"), columns.get("tools", "")):
        made["tools"] = tools
    if "rejected" in made:
        other = _complete({**made, "messages": made["rejected"]})["messages"]
        made = _complete(made) | {"rejected": other}
        if other == made["messages"]:
            raise UnusableError(f"{columns['chosen']!r} and {columns['rejected']!r} are the same")
        return made
    return _complete(made)


def _alpaca(parts: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    instruction = _text(parts["instruction"], columns["instruction"])
    extra = _text(parts["input"], columns["input"], empty="allowed")
    user = {
        "role": "user",
        "content": f"{instruction}\n\n{extra}" if extra else instruction,
        "instruction": instruction,
        "input": extra,
    }
    output = _text(parts["output"], columns["output"])
    return {"messages": [user, {"role": "assistant", "content": output}]}


def _prompt(parts: dict[str, Any], columns: dict[str, str], source: Source) -> dict[str, Any]:
    prompt = _listed(parts["prompt"], columns["prompt"])
    if not isinstance(prompt, list):
        user = {"role": "user", "content": _text(prompt, columns["prompt"], empty="allowed")}
        text = _text(parts["completion"], columns["completion"])
        return {"messages": [user, {"role": "assistant", "content": text}]}
    names = {"role": "role", "content": "content"}
    before = _messages(prompt, names, columns["prompt"], source)
    answer = _listed(parts["completion"], columns["completion"])
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": _text(answer, columns["completion"])}]
    after = _messages(answer, names, columns["completion"], source)
    return {"messages": before + after, "first": len(before)}


def _listed(value: Any, column: str) -> Any:
    """The messages of a cell that holds a list of them as JSON; any other value as it is, also JSON
    that only shares a key with messages, which may be an answer."""
    if not isinstance(value, str) or value.lstrip()[:1] != "[":
        return value
    messages = _messages_in(value, column) or []
    keys = [set(message) for message in messages if isinstance(message, Mapping)]
    alike = any("role" in has and has & {"content", "tool_calls"} for has in keys)
    return messages if alike else value


def _preference(parts: dict[str, Any], columns: dict[str, str], source: Source) -> dict[str, Any]:
    before = _asked(parts["prompt"], columns, source)
    ends = [
        _turns(parts[name], "assistant", columns[name], source) for name in ("chosen", "rejected")
    ]
    whole = [_has_prompt(end, before, parts["prompt"], columns) for end in ends]
    answers = [end if has else before + end for end, has in zip(ends, whole, strict=True)]
    first = _shared(*answers) if any(whole) else len(before)
    if not before and {answers[0][first]["role"], answers[1][first]["role"]} != {"assistant"}:
        raise UnusableError(
            f"{columns['chosen']!r} and {columns['rejected']!r} answer different prompts"
        )
    return {"messages": answers[0], "rejected": answers[1], "first": first}


def _read_rated(parts: dict[str, Any], columns: dict[str, str], source: Source) -> dict[str, Any]:
    before = _asked(parts["prompt"], columns, source)
    after = _turns(parts["completion"], "assistant", columns["completion"], source)
    label = _LABELS.get(str(parts["label"]).strip().lower())
    if label is None:
        raise UnusableError(f"{columns['label']!r} is {parts['label']!r}, not true or false")
    if _has_prompt(after, before, parts["prompt"], columns):
        return {"messages": after, "first": len(after) - 1, "liked": label}
    return {"messages": before + after, "first": len(before), "liked": label}


def _asked(prompt: Any, columns: dict[str, str], source: Source) -> list[dict[str, Any]]:
    """Messages of a prompt; none where the row has none, since its answers hold it."""
    return [] if prompt is None else _turns(prompt, "user", columns["prompt"], source)


def _has_prompt(
    end: list[dict[str, Any]], before: list[dict[str, Any]], prompt: Any, columns: dict[str, str]
) -> bool:
    """True for messages that have the prompt among them, as in UltraFeedback. Raises UnusableError
    for those that begin before an answer, with another prompt than the one that is a text."""
    if end[0]["role"] == "assistant":
        if not before:
            raise UnusableError(
                f"there is no {columns['prompt']!r}, which columns.prompt names, and an answer is "
                "not a conversation that contains it"
            )
        return False
    said = [(m["role"], m["content"]) for m in end[:-1]]
    if all((m["role"], m["content"]) in said for m in before):
        return True
    if isinstance(prompt, str) and before[0]["content"] == prompt:
        raise UnusableError(
            f"an answer begins with a turn of the {end[0]['role']}, and {columns['prompt']!r} is "
            "not among its turns"
        )
    return False


def _shared(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    """Number of messages with which both begin, of which the last one is none."""
    pairs = list(zip(one[:-1], other[:-1], strict=False))
    same = [a["role"] == b["role"] and a["content"] == b["content"] for a, b in pairs]
    return same.index(False) if False in same else len(same)


def _turns(value: Any, role: str, column: str, source: Source) -> list[dict[str, Any]]:
    """Messages from a text, a message or a list of messages, whatever their keys are called."""
    if isinstance(value, str) and SAID.match(value):
        return _transcript(value)
    if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{"):
        return [{"role": role, "content": _text(value, column)}]
    if isinstance(value, str):
        if (messages := _messages_in(value, column)) is None:
            return [{"role": role, "content": _text(value, column)}]
        value = messages
    value = [value] if isinstance(value, Mapping) else value
    spoken = isinstance(value, list) and all(isinstance(m, Mapping) for m in value)
    if isinstance(value, list) and value and not spoken:
        raise UnusableError(f"{column!r} is not text, a message or a list of messages")
    keys = ("from", "value") if spoken and value and "from" in value[0] else ("role", "content")
    return _messages(value, dict(zip(keys, keys, strict=True)), column, source)


def _messages_in(text: str, column: str) -> Any:
    """The message or the list of them that a text is in JSON; None for other JSON, and for what
    only begins with a bracket, which is what somebody said. Raises UnusableError for one that
    Python printed."""
    try:
        value = parse_cell(text, column)
    except UnusableError:
        refuse_printed_messages(text, column)
        return None
    each = value if isinstance(value, list) else [value]
    spoken = any(isinstance(m, Mapping) and not {*m}.isdisjoint(SPEAKERS) for m in each)
    return value if spoken else None


def _transcript(text: str) -> list[dict[str, Any]]:
    """Messages of a text that holds a whole conversation, as in HH-RLHF; a turn that is still to
    come, at the end of a prompt, is none."""
    said = iter(SAID.split(text)[1:])
    turns = [
        {"role": "user" if who == "Human" else "assistant", "content": words.strip()}
        for who, words in zip(said, said, strict=True)
    ]
    return turns if len(turns) == 1 or turns[-1]["content"] else turns[:-1]


def _messages(
    value: Any, columns: dict[str, str], where: str, source: Source
) -> list[dict[str, Any]]:
    value = parse_cell(value, where)
    if not isinstance(value, list) or not value:
        raise UnusableError(f"{where!r} is not a list of messages")
    keys = ("from", "value") if "from" in columns else ("role", "content")
    role_key, content_key = (columns[key] for key in keys)
    known = {role: role for role in ROLES} | (SHAREGPT_ROLES if role_key == "from" else {})
    known |= source.roles
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            raise UnusableError(f"message {number} is not an object")
        role = message.get(role_key)
        if not isinstance(role, str) or role not in known:
            shown = repr(role) if isinstance(role, str) else "absent"
            raise UnusableError(
                f"message {number}: {role_key!r} is {shown}, not one of {', '.join(known)}"
            )
        # columnar files fill in every key that any row has
        rest = {k: v for k, v in message.items() if v is not None}
        content = _content(rest.pop(content_key, None), number, content_key, rest)
        rest.pop(role_key, None)
        if calls := rest.get("tool_calls"):
            rest["tool_calls"] = _calls(calls, number)
        if known[role] == "assistant" and (weight := rest.get("weight", 1)) not in (0, 1):
            raise UnusableError(f"message {number}: 'weight' is {weight!r}, not 0 or 1")
        messages.append({"role": known[role], "content": content, **rest})
    return messages


def _content(value: Any, number: int, key: str, rest: dict[str, Any]) -> str:
    if value is None and rest.get("tool_calls"):
        return ""
    if isinstance(value, list):  # parts, as multimodal data has them
        if not all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in value):
            raise UnusableError(f"message {number}: {key!r} holds more than text")
        return "".join(p["text"] for p in value)
    if not isinstance(value, str):
        raise UnusableError(f"message {number}: {key!r} is not text")
    if media := {*value.strip().splitlines()[:1], *value.splitlines()[-1:]} & MEDIA:
        raise UnusableError(f"message {number}: {key!r} has {media.pop()}, and only text is read")
    return value


def _calls(value: Any, number: int) -> list[Any]:
    """Tool calls, each of which has a name."""
    where = f"message {number}: 'tool_calls'"
    calls = parse_cell(value, "tool_calls") if isinstance(value, str) else value
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UnusableError(f"{where} is not a list of calls")
    for call in calls:
        function = call.get("function")
        if not isinstance((function if isinstance(function, Mapping) else call).get("name"), str):
            raise UnusableError(f"{where} holds a call without a name")
    return calls


def _complete(made: dict[str, Any]) -> dict[str, Any]:
    """Conversation without what follows the assistant's last turn, because nothing is learned from
    it."""
    messages = made["messages"]
    spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not spoken or spoken[-1] < made.get("first", 0):
        raise UnusableError("no turn of the assistant")
    for i in spoken:
        if not messages[i]["content"].strip() and not messages[i].get("tool_calls"):
            raise UnusableError(f"message {i + 1}: the assistant says nothing")
    return {**made, "messages": messages[: spoken[-1] + 1]}


def _text(value: Any, column: str, *, empty: str = "refused") -> str:
    if value is None and empty == "allowed":
        return ""
    if not isinstance(value, str):
        raise UnusableError(f"{column!r} is not text")
    if not value.strip() and empty == "refused":
        raise UnusableError(f"{column!r} is empty")
    return value


def parse_cell(value: Any, column: str) -> Any:
    """Value of a cell, parsed if it is a list written as JSON. Raises UnusableError for other
    text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise not_json(value, column) from None


def plain_text(text: str) -> str:
    """Text of all messages of a conversation (JSON), or of labeled or related texts, for code that
    only needs the words."""
    row = json.loads(text)
    if "messages" not in row:
        return "\n".join(texts_of(row))
    return "\n".join(message["content"] for message in row["messages"])
