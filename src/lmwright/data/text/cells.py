"""Cells of tables that hold lists, as JSON or, which is refused, as Python prints them.

[{"role": "user", "content": "Hi"}]    json.dumps: a list
[{'role': 'user', 'content': 'Hi'}]    str, and pandas' to_csv: a text that only looks like one
"""

import re

from lmwright.data.text.chat_render import UnusableError

_OBJECT = re.compile(r"\s*\[?\s*\{'\w+':")
_ROLE, _SAID = r"(?=.*'(?:role|from)':)", r"(?=.*'(?:content|value|tool_calls)':)"
_MESSAGES = re.compile(_ROLE + _SAID + _OBJECT.pattern, re.S)
_TEXTS = re.compile(r"""\s*\[('.*['"]|".*",?\s+'.*['"])\s*\]\s*""", re.S)


def refuse_printed_messages(text: str, column: str) -> None:
    """Raises UnusableError for a message, or a list of them, that Python printed."""
    if _MESSAGES.match(text):
        raise UnusableError(_printed(column))


def refuse_printed_texts(text: str, column: str) -> None:
    """Raises UnusableError for a list of texts that Python printed."""
    if _TEXTS.fullmatch(text):
        raise UnusableError(_printed(column))


def not_json(text: str, column: str) -> UnusableError:
    """Error for a cell that had to be JSON and is not."""
    if _OBJECT.match(text):
        return UnusableError(_printed(column))
    return UnusableError(f"{column!r} is text, but not JSON")


def _printed(column: str) -> str:
    return (
        f"{column!r} is a list as Python prints it, in single quotes, as pandas writes it to csv; "
        "write it as JSON, by json.dumps, or save the rows as jsonl or parquet"
    )
