"""JSON files: those of foreign origin read, where every problem is an OSError or a ValueError, and
our own written."""

import json
import math
import re
from pathlib import Path
from typing import Any

from lmwright.errors import UserError
from lmwright.guard.files import write_whole

BEGUN = re.compile(r"\\?(u[0-9a-f]{0,3})?|[-.]|e[+-]?|t|tru?|f|fa|fals?|n|nul?", re.IGNORECASE)
"""Nothing, or the beginning of an escape, a number or a word."""


def parse_json(path: Path) -> Any:
    """Value of a UTF-8 JSON file. Raises OSError if it cannot be read, and ValueError with the
    reason if it is not JSON, is nested too deeply, or holds half of a surrogate pair, which no file
    name and no terminal accepts."""
    return parse_text(path.read_text("utf-8"))


def parse_text(text: str) -> Any:
    """`parse_json` of a text."""
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


def json_reason(error: ValueError, of: str) -> str:
    """Reason why the text of a line or file `of` is not JSON. Where it is cut off, `json` names
    what it lacks there, or the newline behind it."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    rest = error.doc[error.pos :].strip()
    cut = error.msg.startswith("Unterminated string") or BEGUN.fullmatch(rest)
    return f"the {of} ends within it" if cut else str(error)


def read_downloaded(path: Path, source: str) -> dict[str, Any]:
    """Object in a JSON file that was downloaded. Raises UserError, naming the `source` that should
    have it, where there is none."""
    try:
        value = parse_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; point at {source}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: is not a JSON object; download it again")
    return value


def write_json(path: Path, value: Any, *, ascii_only: bool = True) -> None:
    """Writes an indented JSON file, whole or not at all. Raises OSError."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=ascii_only) + "\n")


def json_value(value: Any) -> Any:
    """Value without numbers that JSON cannot hold: "NaN", "Infinity" or "-Infinity" in their
    place."""
    if isinstance(value, dict):
        return {key: json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
