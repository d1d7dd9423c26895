"""Calls of tools in messages: copies with other names or arguments, and arguments that are JSON."""

import json
from collections.abc import Sequence
from typing import Any

from lmwright.data.text.chat_render import Message

# What stands in for what is said: neither begins or ends as the other does, so that one of
# them shows where the words differ.
STAND_INS = ("Xq5vJr7Wk", "7hZk2pN4b")


def with_objects(messages: Sequence[Message]) -> list[Message]:
    """Messages in whose calls arguments that are the JSON of an object are that object."""
    calls = [message.get("tool_calls") for message in messages]
    return [
        {**m, "tool_calls": [_with_object(c) for c in each]} if isinstance(each, list) else m
        for m, each in zip(messages, calls, strict=True)
    ]


def quotes_arguments(text: str, messages: Sequence[Message]) -> bool:
    """True for a template's text that has arguments written as JSON in quotes or braces of its
    own."""
    return any(
        form in text
        for message in messages
        for call in message.get("tool_calls") or ()
        if (written := _written(call))
        for form in (json.dumps(written, ensure_ascii=False), json.dumps(written), f"{{{written}}}")
    )


def _written(call: Any) -> str | None:
    """Arguments of a call that are written as JSON."""
    if not isinstance(call, dict):
        return None
    function = call.get("function")
    arguments = (function if isinstance(function, dict) else call).get("arguments")
    return arguments if isinstance(arguments, str) else None


def _with_object(call: Any) -> Any:
    """The call with its arguments parsed."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_object(call["function"])}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        made = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": made} if isinstance(made, dict) else call


def alter_calls(calls: Any) -> list[tuple[int, str, list[Any]]]:
    """Copies of the calls with one part of one of them changed: its number, the part, all calls."""
    copies = []
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        for part in ("name", "arguments"):
            other = other_call(call, STAND_INS[0], part)
            if other != call:
                copies.append((number, part, [*calls[:number], other, *calls[number + 1 :]]))
    return copies


def other_call(call: Any, word: str, part: str) -> Any:
    """Call, or tool, of the same shape that has `word` in its name or in its arguments."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": other_call(call["function"], word, part)}
    changed = {}
    for key in ("name",) if part == "name" else ("arguments", "parameters"):
        if isinstance(call.get(key), str):  # arguments may be written as JSON
            changed[key] = word if part == "name" else f'{{"{word}": "{word}"}}'
        elif isinstance(call.get(key), dict):
            changed[key] = {word: word}
    return {**call, **changed}


def other_tools(tools: Any) -> Any:
    """Tools under other names; None, as if there were none, if they have no names."""
    if not isinstance(tools, list):
        return None
    other = [other_call(tool, STAND_INS[0], "name") for tool in tools]
    return other if other != tools else None
