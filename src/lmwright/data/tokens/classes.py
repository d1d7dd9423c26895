"""Classes: the numbers of labels beside the tokens of their texts, and how often each occurs; or
labels that are numbers themselves."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lmwright.config.rows import LABELED, RELATED
from lmwright.data.manifest import add_counts
from lmwright.data.text.labeled import class_of, number_of
from lmwright.errors import UserError
from lmwright.guard.terminal import visible


@dataclass(frozen=True)
class Classes:
    """The classes of a run, and the tokens of a row, to which longer texts are cut."""

    labels: tuple[str, ...]
    seq_len: int

    unit: ClassVar[str] = "text"
    """Unit that has a label."""
    called: ClassVar[str] = "label"
    """Name of a label in messages."""
    left_out: ClassVar[str] = ", or name the label in data.sources.unlabeled to leave such rows out"
    """The way to do without rows of one label."""

    def number(self, label: str, source: str, row: str) -> int:
        """Index of a label among the classes. Raises UserError, naming its row, for one that is
        none of them."""
        number = class_of(label, self.labels)
        if number is None:
            parts = [part.strip() for part in re.split("[,;|]", label)]
            cure = f"add it there, or correct the row{self.left_out}"
            if len(parts) > 1 and {*parts} <= {*self.labels}:
                cure = (
                    f"write several as a list, {json.dumps(parts)}, also in a cell of csv, for "
                    'objective.kind = "multilabel"'
                )
            raise UserError(
                f"{visible(source, lines=False)}: {visible(row, lines=False)} has the "
                f"{self.called} {label[:80]!r}, which is not one of objective.labels = "
                f"{listed(self.labels)}; {cure}"
            )
        return number

    def count(self, numbers: Sequence[float]) -> dict[str, Any]:
        """Number of texts of each class."""
        return {"classes": dict(Counter(self.labels[int(number)] for number in numbers))}

    def check(self, counts: Sequence[Mapping[str, Any]], _folder: Path) -> dict[str, Any]:
        """Returns no facts. Raises UserError for a class of which no text is for training, by the
        counts of all parts."""
        train = reduce(add_counts, counts, {}).get("sources", {}).get("train", {})
        seen = reduce(add_counts, (source["classes"] for source in train.values()), {})
        missing = [label for label in self.labels if label not in seen]
        if missing:
            raise UserError(
                f"objective.labels: no {self.unit} for training is of the class "
                f"{listed(missing)}, of {sum(seen.values())} {self.unit}s; add some, lower "
                "data.holdout_fraction if all are held out, or leave the class out, and then give "
                "labels by name: numbers in the rows count the classes that are listed"
            )
        return {}


@dataclass(frozen=True)
class Numbers:
    """Labels that are numbers, and the tokens of a row, to which longer texts are cut."""

    seq_len: int

    labels: ClassVar[tuple[str, ...]] = ()

    def number(self, label: str, source: str, row: str) -> float:
        """The number of a label. Raises UserError, naming its row, for a label that is none."""
        number = number_of(label)
        if number is None:
            raise UserError(
                f"{visible(source, lines=False)}: {visible(row, lines=False)} has the label "
                f"{label[:80]!r}, which is not a finite number of float32; correct the row"
            )
        return number

    def count(self, numbers: Sequence[float]) -> dict[str, Any]:
        """Count of the numbers, their sum and the sum of their squares."""
        sums = {"sum": math.fsum(numbers), "squares": math.fsum(n * n for n in numbers)}
        return {"numbers": {"count": len(numbers), **sums}}

    def check(self, counts: Sequence[Mapping[str, Any]], _folder: Path) -> dict[str, Any]:
        """Returns no facts, since any numbers will do."""
        return {}


def labels_text(counts: Mapping[str, Any]) -> str:
    """The labels of a source as text, from its counts; empty where it has none."""
    if classes := counts.get("classes"):
        return ", ".join(f"{n:,} {visible(c)}" for c, n in classes.items())
    if not (numbers := counts.get("numbers")) or not numbers["count"]:
        return ""
    mean = numbers["sum"] / numbers["count"]
    spread = max(0.0, numbers["squares"] / numbers["count"] - mean**2) ** 0.5
    return f"{numbers['count']:,} numbers of mean {mean:.4g} and standard deviation {spread:.4g}"


def listed(labels: Sequence[str]) -> str:
    """The first labels, for a message."""
    shown = ", ".join(repr(label) for label in labels[:8])
    return f"[{shown}{', ...' if len(labels) > 8 else ''}]"


class Labels:
    """The numbers of the classes of the documents of one token file, or their own."""

    per_token: ClassVar[bool] = False
    """True if something stands beside each token."""

    def __init__(self, classes: Classes | Numbers, source: str):
        self.classes, self.source = classes, source
        self.numbers: list[float] = []
        self.cut = 0

    def add(self, label: str | list[str], id_: str, tokens: int) -> np.ndarray:
        """Adds the label of a text; returns the values beside its tokens, which are none. Raises
        UserError for an unknown class, a label that is no number, and several labels."""
        if isinstance(label, list):
            raise UserError(
                f"{visible(self.source, lines=False)}: {visible(id_, lines=False)} has a list of "
                "labels; use objective.kind = 'multilabel', or give each text one label"
            )
        self.numbers.append(self.classes.number(label, self.source, id_))
        return np.zeros(0)

    def fit(
        self,
        texts: Sequence[np.ndarray],
        before: Sequence[int],
        after: Sequence[int],
        between: Sequence[int],
    ) -> np.ndarray:
        """Ids of a text, or of two as one document, without those around it, cut so that all fit in
        a row."""
        ids, cut = joined(texts, self.classes.seq_len, before, after, between)
        self.cut += cut
        return np.asarray(ids, texts[0].dtype)

    def counts(self) -> dict[str, Any]:
        """Counts of the texts that were cut, and of their labels."""
        return {"cut": self.cut, **self.classes.count(self.numbers)}


def joined(
    texts: Sequence[Any],
    most: int,
    before: Sequence[int],
    after: Sequence[int],
    between: Sequence[int],
    *,
    side: str = "right",
) -> tuple[list[int], bool]:
    """Ids of a text, or of two with what is between them, and whether they were cut at a side to
    leave room for what is around them in `most` tokens: of two, the longer one is cut first, as
    transformers does."""
    around = len(before) + len(after) + (len(texts) - 1) * len(between)
    room = max(0, most - around)
    sizes = [len(text) for text in texts]
    cut = sum(sizes) > room
    if cut and len(texts) == 1:
        sizes = [room]
    elif cut:
        short = min(*sizes, room // 2)
        longer = int(sizes[1] >= sizes[0])
        sizes[longer], sizes[1 - longer] = room - short, short
    starts = [len(t) - size if side == "left" else 0 for t, size in zip(texts, sizes, strict=True)]
    pieces = zip(texts, starts, sizes, strict=True)
    first, *second = ([*text[start : start + size]] for text, start, size in pieces)
    return [*first, *(token for text in second for token in (*between, *text))], cut


def rows_of_texts(rows: Sequence[Any]) -> list[Mapping[str, Any] | None]:
    """The texts of each row of normalize that is labeled or related, and its label."""
    several = (LABELED, RELATED)
    return [json.loads(row.text) if row.kind in several else None for row in rows]
