"""The tally of texts that may have any number of classes."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmwright.data.text.labeled import class_of, label_text, labels_in
from lmwright.data.tokens.classes import listed
from lmwright.errors import UserError
from lmwright.evals.label_sets import SetLoss
from lmwright.evals.tallies import Tally

THRESHOLD = 0.5
LEAST = 1e-30  # of a probability, whose logarithm is taken


class SetTally(Tally):
    """Tally of texts that are given the classes whose probability is above a threshold."""

    def __init__(self, labels: Sequence[str], threshold: float | None = None):
        super().__init__()
        self.labels = labels
        self.threshold = THRESHOLD if threshold is None else threshold
        self.given: Counter[str] = Counter()
        """Texts by each class that they were given."""
        self.pairs = np.zeros((len(labels), 3))
        """Of texts whose classes are known: those that rightly were given a class, that were given
        it, and that have it."""
        self.known = self.right = 0
        self.nll = 0.0
        """Of these texts, summed."""

    def expected(self, value: Any, id_: str, column: str) -> list[str]:
        names = labels_in(value)
        names = [label_text(value)] if names is None else names
        numbers = [class_of(name, self.labels) for name in names]
        if None in numbers:
            raise UserError(
                f"{id_}: {column} {names[numbers.index(None)][:80]!r} is not one of the model's "
                f"classes {listed(self.labels)}; correct the row, or leave --label-column out"
            )
        return [label for i, label in enumerate(self.labels) if i in numbers]

    def made(self, scores: np.ndarray) -> dict[str, Any]:
        """The classes above the threshold, and the probability of each."""
        shares = 0.5 + 0.5 * np.tanh(scores / 2)  # the sigmoid, without overflow
        named = list(zip(self.labels, shares, strict=True))
        return {
            "labels": [label for label, share in named if share > self.threshold],
            "scores": {label: float(f"{share:.6g}") for label, share in named},
        }

    def count(self, line: Mapping[str, Any]) -> None:
        self.given.update(line["labels"])
        if (real := line.get("expected")) is None:
            return
        for place, label in enumerate(self.labels):
            has, given = label in real, label in line["labels"]
            self.pairs[place] += [has and given, given, has]
        shares = [(s if c in real else 1 - s) for c, s in line["scores"].items()]
        nll = -sum(math.log(max(share, LEAST)) for share in shares) / len(shares)
        self.known, self.nll = self.known + 1, self.nll + nll
        self.right += sorted(real) == sorted(line["labels"])
        text = f"least likely: {line['id']}, {listed(real)}, was given {listed(line['labels'])}"
        self.remember(nll, text)

    def counts(self) -> str:
        return ", ".join(f"{self.given[label]:,} {label}" for label in self.labels)

    def loss(self, source: str) -> SetLoss:
        count = max(self.known, 1)
        return SetLoss(
            source, self.nll / count, self.right / count, count,
            labels=self.labels, label_counts=self.pairs,
        )  # fmt: skip
