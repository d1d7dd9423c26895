"""Tagged words: rows of a list of words and a list of their tags.

{"tokens": ["Ada", "slept"], "tags": ["B-PER", 0]} --tagged_words--> the same, all as strings
"""

from collections.abc import Mapping
from typing import Any

from lmwright.config.rows import ROW_PARTS, TAGGED
from lmwright.config.run import Source
from lmwright.data.text.chat_render import UnusableError
from lmwright.data.text.labeled import label_text


def tagged_words(row: Mapping[str, Any], source: Source) -> dict[str, list[str]]:
    """The words and the tags of a row, as strings. Raises UnusableError for lists of different
    lengths, and for what is no word or no tag."""
    parts = {}
    for name in ROW_PARTS[TAGGED][0]:
        column = source.columns.get(name, name)
        found = row.get(column)
        if not isinstance(found, list):
            cure = "; write such rows as jsonl or parquet" if isinstance(found, str) else ""
            raise UnusableError(f"{column!r} is not a list{cure}")
        parts[name] = column, found
    (word_column, words), (tag_column, tags) = parts["tokens"], parts["tags"]
    if len(words) != len(tags):
        raise UnusableError(
            f"{word_column!r} has {len(words)} words and {tag_column!r} {len(tags)} tags"
        )
    if not words:
        raise UnusableError(f"{word_column!r} is empty")
    for place, (word, tag) in enumerate(zip(words, tags, strict=True), 1):
        if not isinstance(word, str) or not word.strip():
            raise UnusableError(f"word {place} of {word_column!r} is empty or not text")
        if not label_text(tag):
            raise UnusableError(f"tag {place} of {tag_column!r} is not a name or a number")
    return {"tokens": [w.strip() for w in words], "tags": [label_text(tag) for tag in tags]}
