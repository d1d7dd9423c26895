"""Label sets: which of the classes each text has, beside its tokens.

    ["red", "round"] of ["red", "small", "round"] --> bits 101 --> 5 beside the first token

Each token has room for the bits of 16 classes, the first one for those of the first 16.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lmwright.config.rows import CLASSES_PER_TOKEN
from lmwright.data.tokens.classes import Classes, Labels
from lmwright.data.tokens.tags import DTYPE
from lmwright.errors import UserError
from lmwright.guard.terminal import visible


@dataclass(frozen=True)
class LabelSets(Classes):
    """The classes of a run, of which a text may have any number."""

    unit: ClassVar[str] = "label"


class SetColumn(Labels):
    """The classes of the documents of one token file."""

    per_token: ClassVar[bool] = True

    def __init__(self, classes: LabelSets, source: str):
        super().__init__(classes, source)
        self.seen: Counter[str] = Counter()

    def add(self, label: str | list[str], id_: str, tokens: int) -> np.ndarray:
        """uint16 [tokens] of a text with these labels. Raises UserError for one that is not among
        the classes, and for a text of fewer tokens than have room for all classes."""
        names = label if isinstance(label, list) else [label]
        if self._is_vector(names):
            raise UserError(
                f"{visible(self.source, lines=False)}: {visible(id_, lines=False)} has 0 or 1 for "
                "each class; give the list of the classes that it has"
            )
        numbers = sorted({self.classes.number(name, self.source, id_) for name in names})
        classes = self.classes.labels
        needed = -(-len(classes) // CLASSES_PER_TOKEN)
        if tokens < needed:
            raise UserError(
                f"{visible(self.source, lines=False)}: {visible(id_, lines=False)} has {tokens} "
                f"tokens, and {len(classes)} classes need {needed} to be stored; leave the "
                "row out"
            )
        self.seen.update(classes[number] for number in numbers)
        return set_bits(numbers, tokens)

    def _is_vector(self, names: Sequence[str]) -> bool:
        """True for a 0 or 1 for each class, which are no numbers of classes: some occur twice."""
        classes = self.classes.labels
        told = len(names) == len(classes) and {*names} <= {"0", "1"} - {*classes}
        return told and len({*names}) < len(names)

    def counts(self) -> dict[str, Any]:
        """Counts of the texts that were cut, and of the texts with each class."""
        return {"cut": self.cut, "classes": dict(self.seen)}


def set_bits(numbers: Sequence[int], tokens: int) -> np.ndarray:
    """uint16 [tokens] with the bits of these classes."""
    beside = np.zeros(tokens, DTYPE)
    for number in numbers:
        beside[number // CLASSES_PER_TOKEN] |= 1 << number % CLASSES_PER_TOKEN
    return beside


def names_in(beside: Sequence[float], labels: Sequence[str]) -> list[str]:
    """The classes whose bits are set beside the tokens of a text."""
    group = lambda i: int(beside[i // CLASSES_PER_TOKEN]) >> i % CLASSES_PER_TOKEN  # noqa: E731
    return [label for i, label in enumerate(labels) if group(i) & 1]
