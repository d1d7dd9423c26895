"""JSON files of foreign origin: whatever is wrong with one is an OSError or a ValueError."""

import json
from pathlib import Path
from typing import Any


def parse_json(path: Path) -> Any:
    """The value in a UTF-8 JSON file. Raises OSError where it cannot be read, ValueError with the
    reason where it is no JSON, is nested too deeply, or holds half of a surrogate pair, which no
    file name and no terminal takes."""
    text = path.read_text("utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if "\\ud" in text.lower():  # a pair is fine, a half of one is no text
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("contains half of a surrogate pair") from None
    return value
