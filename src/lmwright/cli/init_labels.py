"""Labels of the first rows of a source, and the recipe that learns from them.

rows, names of classes --labels_of--> amounts? --> finetune-regression
                                      several? --> finetune-multilabel
                                      else     --> finetune-classifier or finetune-tagger
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmwright.cli.init_columns import AMOUNT
from lmwright.config.rows import LABELED, TAGGED
from lmwright.config.run import Source
from lmwright.config.text import literal
from lmwright.data.sources.columns import Bad, Row
from lmwright.data.text.chat import example_columns
from lmwright.errors import UserError

MOST_LABELS = 200
YES_OR_NO = {"0", "1"}
UNKNOWN, NO_NAME = "-1", "-"
"""Label of a row without one, where labels are numbers or names (as in SNLI)."""
MOST_NOTED = 20
MOST_COLUMNS = 8  # that a note names
AS_VECTORS = (
    "the numbers are learned by a model that reads both texts of a pair; for vectors whose cosines "
    'they are, write recipe = "finetune-similarity" (docs/similarity.md)'
)


@dataclass(frozen=True)
class Labels:
    """Labels of a source, and the recipe that learns from them."""

    recipe: str = ""
    names: tuple[str, ...] = ()
    numbered: bool = False
    """True where the rows have the places of the names."""
    unlabeled: str | None = None
    """Label of rows without one."""
    note: str = ""
    """Another way in which they may be meant."""


def of_prompts(source: Source, columns: Sequence[str]) -> Labels:
    """Labels of prompts with answers: none, and a note on the columns that are not read."""
    needed, optional, *_ = example_columns(source)
    read = {*needed.values(), *optional.values()}
    left = [name for name in columns if name not in read]
    if not left:
        return Labels()
    names, others = left[:MOST_COLUMNS], len(left) - MOST_COLUMNS
    more = f" and {others} more" if others > 0 else ""
    return Labels(
        note=f"not read, of its columns: {', '.join(names)}{more}; where they belong to what is "
        "asked, as choices do, write them into the prompt"
    )


def of_texts(columns: Sequence[str], rows: Iterable[Row | Bad]) -> Labels:
    """Labels of plain texts with these columns, whose rows keep the others as metadata: none, and a
    note on columns that may be meant as labels."""
    if len(classes := _yes_or_no(columns, rows)) > 1:
        some, more = classes[:MOST_COLUMNS], ", ..." * (len(classes) > MOST_COLUMNS)
        return Labels(
            note=f"its columns {', '.join(some)}{more} have only 0 and 1, and are not read; if "
            "they are the classes of a text, write the names of those that it has into one column, "
            f"as the list {literal(classes[:2])} (docs/multilabel.md)"
        )
    amount = next((name for name in columns if name.strip().casefold() == AMOUNT), None)
    note = (
        f"its column {amount} is not read; for a model that tells the number of a text, add "
        "--rows labeled and the --model of an encoder (docs/regression.md)"
    )
    return Labels(note=note if amount is not None else "")


def _yes_or_no(columns: Sequence[str], rows: Iterable[Row | Bad]) -> list[str]:
    """Columns, kept as metadata, in which all rows have 0 or 1, and some rows each of them."""
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in json.loads(row.meta).items() if isinstance(row, Row) else ():
            values.setdefault(name, set()).add(str(int(value) if value in (0, 1) else value))
    return [name for name in columns if values.get(name) == YES_OR_NO]


def label_column(source: Source) -> str:
    """Column of the labels, or of the tags, of a source."""
    part = "tags" if source.rows == TAGGED else "label"
    return source.columns.get(part, part)


def labels_of(source: Source, rows: Iterable[Row | Bad], names: tuple[str, ...]) -> Labels:
    """Labels of rows that keep their column of labels as metadata, and whose numbers may have
    `names`. Raises UserError for more labels than classes may be."""
    several, decimals, paired, there = False, False, False, dict[str, None]()
    for row in rows:
        if isinstance(row, Row):
            made = json.loads(row.text)
            told, paired = made["tags" if source.rows == TAGGED else "label"], "text_pair" in made
            several |= source.rows == LABELED and isinstance(told, list)
            decimals |= isinstance(json.loads(row.meta).get(label_column(source)), float)
            there |= dict.fromkeys(told if isinstance(told, list) else [told])
    named = bool(names) and all(label.removeprefix("-").isdecimal() for label in there)
    numbers = not named and source.rows == LABELED and all(map(_is_number, there))
    if numbers and not several and not _are_classes(source, set(there), decimals):
        note = _as_classes(source, [*there], decimals) or (AS_VECTORS if paired else "")
        return Labels("finetune-regression", note=note)
    unknown = UNKNOWN if named or numbers else NO_NAME
    if several or source.rows != LABELED or unknown not in there or len(there) < 3:
        unknown = None
    labels = names if named else tuple(name for name in there if name != unknown)
    if len(labels) > MOST_LABELS:
        raise UserError(
            f"{source.path}: its first rows have {len(labels)} labels; if they are plain texts, "
            "add --rows text"
        )
    recipe = "finetune-multilabel" if several else "finetune-classifier"
    recipe = "finetune-tagger" if source.rows == TAGGED else recipe
    note = (
        f'rows with the label "{unknown}" are left out as those without one; if it is a class, '
        "move it from unlabeled to objective.labels"
    )
    return Labels(recipe, labels, named, unknown, note if unknown else "")


def together(sources: Mapping[str, Labels]) -> list[str]:
    """Labels of all sources, by their paths: in the order of the numbers that rows have, or "O"
    first. Raises UserError for a number that is one label here and another there, and for a single
    label."""
    numbered = {labels.names: path for path, labels in sources.items() if labels.numbered}
    if len(numbered) > 1:
        raise UserError(
            f"{' and '.join(numbered.values())}: number their labels differently; write the labels "
            "as names, or give only one of them"
        )
    labels = sorted({name for each in sources.values() for name in each.names})
    if len(labels) == 1:
        raise UserError(
            f"{' and '.join(sources)}: all first rows have the label {labels[0]!r}, but a model "
            "needs at least two to tell apart; if they are plain texts, add --rows text"
        )
    if numbered:
        return [*next(iter(numbered))]
    return sorted(labels, key=lambda name: (name != "O", int(name) if name.isdecimal() else 0))


def _are_classes(source: Source, numbers: set[str], decimals: bool) -> bool:
    """True for numbers that count from 0, as classes do; of those that are written as decimals, as
    amounts are, only for 0.0 and 1.0."""
    if decimals:
        return numbers == YES_OR_NO
    known = numbers - {UNKNOWN} if len(numbers) > 3 else numbers
    counted = known == {str(number) for number in range(len(known))}
    return counted and label_column(source).casefold() != AMOUNT


def _as_classes(source: Source, numbers: list[str], decimals: bool) -> str:
    """The note that a few whole numbers, which become amounts, may be classes."""
    whole = not decimals and all(number.removeprefix("-").isdecimal() for number in numbers)
    if not whole or len(numbers) > MOST_NOTED or label_column(source).casefold() == AMOUNT:
        return ""
    labels = literal(sorted(numbers, key=int))
    return (
        "its labels are learned as amounts; if they are classes, write recipe = "
        f'"finetune-classifier" and [objective] with labels = {labels}'
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
