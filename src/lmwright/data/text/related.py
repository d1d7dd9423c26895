"""Related texts: rows of an anchor, a positive that belongs to it, and negatives that do not.

{"anchor": "who wrote Emma?", "positive": "Jane Austen wrote Emma.", "negative": "Emma is a name."}
--related_texts--> {"anchor": ..., "positive": ..., "negatives": ["Emma is a name."]}
"""

import json
from collections.abc import Mapping
from typing import Any

from lmwright.config.run import Source
from lmwright.data.text.cells import refuse_printed_texts
from lmwright.data.text.chat_render import UnusableError

NAMES = ("anchor", "positive", "negative")


def related_texts(row: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """The texts of a row as strings, behind the source's prompts; `negative` may be a text, a list
    of them, or a list written as JSON. Raises UnusableError for a part that is missing, empty or of
    another type, and where what belongs to a text is that text."""
    columns = {name: source.columns.get(name, name) for name in NAMES}
    anchor, positive = (_text(row.get(columns[name]), columns[name]) for name in NAMES[:2])
    if anchor == positive:
        raise UnusableError(f"{columns['anchor']!r} and {columns['positive']!r} are the same")
    found = _list(row.get(columns["negative"]), columns["negative"])
    negatives = [_text(text, columns["negative"]) for text in found]
    query, passage = (source.prompts.get(name, "") for name in ("query", "passage"))
    return {
        "anchor": query + anchor,
        "positive": passage + positive,
        "negatives": [passage + text for text in negatives],
    }


def texts_in(row: Mapping[str, Any]) -> list[str]:
    """All texts of a row of related ones, in order."""
    return [row["anchor"], row["positive"], *row["negatives"]]


def _list(value: Any, column: str) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            refuse_printed_texts(value, column)
            return [value]  # a text that begins with a bracket
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UnusableError(f"{column!r} is {'empty' if isinstance(value, str) else 'not text'}")
    return value
