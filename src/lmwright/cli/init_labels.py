"""Labels of the first rows of a source, and the recipe that learns from them.

rows --label_of--> labels, all numbers?--> finetune-regression
                           several?------> finetune-multilabel
                           else----------> finetune-classifier or finetune-tagger
"""

import json
from collections.abc import Iterable
from dataclasses import replace

from lmwright.config.rows import LABELED, TAGGED
from lmwright.config.run import Source
from lmwright.data.sources.columns import Bad, Row
from lmwright.errors import UserError

MOST_LABELS = 200
YES_OR_NO = {"0", "1"}
AMOUNT = "score"
"""Name of a column whose numbers are amounts, whatever they are."""


def with_raw_labels(source: Source) -> Source:
    """A labeled source whose rows keep their labels as they are in the file, too."""
    return replace(source, meta_columns=(_label_column(source),))


def labels_of(source: Source, rows: Iterable[Row | Bad]) -> tuple[str, tuple[str, ...]]:
    """The recipe of labeled rows, or of tagged ones, and their labels where those are names.
    Raises UserError for more labels than classes may be."""
    several, decimals, names = False, False, dict[str, None]()
    for row in rows:
        if isinstance(row, Row):
            told = json.loads(row.text)["tags" if source.rows == TAGGED else "label"]
            several |= source.rows == LABELED and isinstance(told, list)
            raw = json.loads(row.meta).get(_label_column(source))
            decimals |= isinstance(raw, float)
            names |= dict.fromkeys(told if isinstance(told, list) else [told])
    one = source.rows == LABELED and not several
    if one and all(map(_is_number, names)) and not _are_classes(source, set(names), decimals):
        return "finetune-regression", ()
    if len(names) > MOST_LABELS:
        raise UserError(
            f"{source.path}: its first rows have {len(names)} labels; if they are plain texts, add "
            "--rows text"
        )
    if source.rows == TAGGED:
        return "finetune-tagger", tuple(names)
    return "finetune-multilabel" if several else "finetune-classifier", tuple(names)


def _are_classes(source: Source, numbers: set[str], decimals: bool) -> bool:
    """True for numbers that count from 0, as classes do; of those that are written as decimals, as
    amounts are, only for 0.0 and 1.0."""
    if decimals:
        return numbers == YES_OR_NO
    counted = numbers == {str(number) for number in range(len(numbers))}
    return counted and _label_column(source).casefold() != AMOUNT


def _label_column(source: Source) -> str:
    return source.columns.get("label", "label")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
