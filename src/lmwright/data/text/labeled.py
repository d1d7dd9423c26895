"""Labeled texts: rows of a text, or of two, and their class or their number.

{"text": "A fine film.", "label": "positive"} --labeled_text--> the same as two strings
"positive", objective.labels                  --class_of------> 1
"3.5"                                         --number_of-----> 3.5
["fine", "short"], or the same as JSON        --labels_in-----> ["fine", "short"]
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmwright.config.rows import ROW_PARTS
from lmwright.config.run import Source
from lmwright.data.text.chat_render import UnusableError
from lmwright.data.text.related import texts_in

LARGEST = 3e38  # of float32


def labeled_text(row: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """The text, the second one where there is one, and the label or the list of labels of a row,
    as strings. Raises UnusableError for a part that is missing, empty or of another type."""
    names = (*ROW_PARTS["labeled"][0], *ROW_PARTS["labeled"][1])
    columns = {name: source.columns.get(name, name) for name in names}
    text, label, second = (row.get(columns[name]) for name in names)
    if not isinstance(text, str) or not text.strip():
        raise UnusableError(f"{columns['text']!r} is {'empty' if text == '' else 'not text'}")
    several = labels_in(label)
    label = label_text(label) if several is None else several
    if not (label if several is None else all(label)):
        inside = "" if several is None else "one of "
        raise UnusableError(f"{inside}{columns['label']!r} is not a name or a number")
    if second is None or second == "":
        return {"text": text, "label": label}
    if not isinstance(second, str):
        raise UnusableError(f"{columns['text_pair']!r} is not text")
    return {"text": text, "label": label, "text_pair": second}


def texts_of(row: Mapping[str, Any]) -> list[str]:
    """The text of a labeled row, and the second one where there is one; those of a related
    one; the words of a tagged one, joined; a question and its context."""
    if "anchor" in row:
        return texts_in(row)
    if "question" in row:
        return [row["question"], row["context"]]
    if "tokens" in row:
        return [" ".join(row["tokens"])]
    return [row[name] for name in ("text", "text_pair") if name in row]


def labels_in(value: Any) -> list[str] | None:
    """The labels of a list, or of one that is written as JSON, as strings; None for what is no
    list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None  # a name that begins with a bracket
    return [label_text(each) for each in value] if isinstance(value, list | tuple) else None


def label_text(label: Any) -> str:
    """A label of any format as a string: 1, 1.0 and "1 " are "1", true is "true"; empty for what
    is no name and no finite number."""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float):
        if not math.isfinite(label):
            return ""
        label = int(label) if label.is_integer() else repr(label)
    return str(label).strip() if isinstance(label, int | str) else ""


def number_of(label: str) -> float | None:
    """The number of a label, finite and within float32; None for other labels."""
    try:
        number = float(label)
    except ValueError:
        return None
    return number if abs(number) < LARGEST else None


def class_of(label: str, labels: Sequence[str]) -> int | None:
    """Index of a label among the classes, given by name or, where no class is a number, counted
    from 0; None for a label that is none of them."""
    if label in labels:
        return labels.index(label)
    if label.isdecimal() and not any(name.isdecimal() for name in labels):
        return int(label) if int(label) < len(labels) else None
    return None
