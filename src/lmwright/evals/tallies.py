"""Tallies: what is written of each text by its scores, and the counts of a whole file."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from lmwright.core.compute import Compute
from lmwright.data.text.labeled import class_of, label_text, number_of
from lmwright.data.tokens.classes import listed
from lmwright.errors import UserError
from lmwright.evals.classes import ClassLoss
from lmwright.evals.numbers import NumberLoss
from lmwright.evals.source_loss import SourceLoss
from lmwright.evals.tables import print_losses
from lmwright.guard.terminal import visible

WORST = 5  # texts that are shown


class Tally:
    """Counts of the lines that are written; `add` takes them as they are in the file."""

    def __init__(self) -> None:
        self.texts = 0
        self.cut = 0
        """Texts longer than the model takes, of which the beginning was read."""
        self.bad = 0
        """Rows without a text."""
        self.worst: list[tuple[float, str]] = []
        """Of the texts whose label is known, those that it fits least."""

    def expected(self, value: Any, id_: str, column: str) -> Any:
        """The label that a row says it has. Raises UserError for one that is none."""
        raise NotImplementedError

    def made(self, scores: Any) -> dict[str, Any]:
        """Fields of a line for what a text was given, such as raw scores [K]."""
        raise NotImplementedError

    def add(self, line: Mapping[str, Any]) -> None:
        """Counts a line of what is written."""
        if "error" in line:
            self.bad += 1
            return
        self.texts += 1
        self.cut += "cut" in line
        self.count(line)

    def count(self, line: Mapping[str, Any]) -> None:
        """Counts the line of a text."""
        raise NotImplementedError

    def remember(self, wrong: float, text: str) -> None:
        """Keeps a text among the worst if it is as `wrong` as they are."""
        self.worst = sorted([*self.worst, (-wrong, text)])[:WORST]

    def counts(self) -> str:
        """Counts of what the texts were given, as text; may be empty."""
        return ""

    def line(self, most: int) -> str:
        """The counts as a sentence, for a model that takes `most` tokens."""
        counts = self.counts()
        notes = [f"{self.texts:,} texts{f': {counts}' if counts else ''}"]
        notes += [f"{self.cut:,} cut to {most:,} tokens"] if self.cut else []
        notes += [f"{self.bad:,} rows without a text"] if self.bad else []
        return visible("; ".join(notes), lines=False)

    def show(self, name: str, compute: Compute, console: Console) -> None:
        """Prints the scores of the texts of a file whose label is known, and the worst of them."""
        print_losses([self.loss(name)], compute, console)
        for _, text in self.worst:
            console.print(visible(text, lines=False), markup=False, soft_wrap=True)

    def loss(self, source: str) -> SourceLoss:
        """The scores of the texts of a file whose label is known."""
        raise NotImplementedError


def refuse_threshold(threshold: float | None) -> None:
    """Raises UserError for a threshold, of a model that gives one label each."""
    if threshold is not None:
        raise UserError(
            f"--threshold: {threshold:g} has no effect on a model that does not give a text "
            "several labels (objective.kind = 'multilabel'); leave it out"
        )


def softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities [..., K] of raw scores."""
    exps = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


class ClassTally(Tally):
    """Tally of texts that are put into classes."""

    def __init__(self, labels: Sequence[str]):
        super().__init__()
        self.labels = labels
        self.given: Counter = Counter()
        """Texts by the class that they were given."""
        self.pairs: Counter = Counter()
        """Texts by the class that they have, where it is known, and the one given."""
        self.nll = 0.0
        """Of these classes, summed."""

    def expected(self, value: Any, id_: str, column: str) -> str:
        label = label_text(value)
        number = class_of(label, self.labels)
        if number is None:
            raise UserError(
                f"{id_}: {column} {label[:80]!r} is not one of the model's classes "
                f"{listed(self.labels)}; correct the row, or leave --label-column out"
            )
        return self.labels[number]

    def made(self, scores: np.ndarray) -> dict[str, Any]:
        shares = softmax(scores)
        named = zip(self.labels, shares, strict=True)
        return {
            "label": self.labels[int(shares.argmax())],
            "scores": {label: float(f"{share:.6g}") for label, share in named},
        }

    def count(self, line: Mapping[str, Any]) -> None:
        given = line["label"]
        self.given[given] += 1
        if (real := line.get("expected")) is not None:
            score = line["scores"][real]
            self.pairs[real, given] += 1
            self.nll -= math.log(max(score, 1e-300))
            text = f"least likely: {line['id']}, {real} at {score:.2%}, was given {given}"
            self.remember(1 - score, text)

    def counts(self) -> str:
        return ", ".join(f"{self.given[label]:,} {label}" for label in self.labels)

    def loss(self, source: str) -> ClassLoss:
        labels = self.labels
        confusion = np.array([[self.pairs[a, b] for b in labels] for a in labels], np.float64)
        count = max(self.pairs.total(), 1)
        right = float(np.trace(confusion)) / count
        return ClassLoss(source, self.nll / count, right, count, labels=labels, confusion=confusion)


class NumberTally(Tally):
    """Tally of texts that are given a number."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[float, float]] = []
        """The numbers that texts have, where they are known, and the ones that they were given."""

    def expected(self, value: Any, id_: str, column: str) -> float:
        number = number_of(label := label_text(value))
        if number is None:
            raise UserError(
                f"{id_}: {column} {label[:80]!r} is not a finite number; correct the row, or leave "
                "--label-column out"
            )
        return number

    def made(self, scores: np.ndarray) -> dict[str, Any]:
        return {"score": float(f"{scores[0]:.7g}")}

    def count(self, line: Mapping[str, Any]) -> None:
        if (real := line.get("expected")) is not None:
            self.pairs.append((real, line["score"]))
            text = f"farthest: {line['id']}, {real:g}, was given {line['score']:g}"
            self.remember(abs(real - line["score"]), text)

    def loss(self, source: str) -> NumberLoss:
        pairs = np.array(self.pairs).reshape(-1, 2)
        mse = float(np.mean((pairs[:, 0] - pairs[:, 1]) ** 2)) if len(pairs) else 0.0
        return NumberLoss(source, mse, 0.0, len(pairs), numbers=pairs)
