"""Scores of classes of which a text may have any number, all from counts [K, 3] of texts that
rightly were given a class, those that were given it, and those that have it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.evals.loss import Rows, RowTally
from lmwright.evals.tables import TaskLoss, table_of
from lmwright.objectives.multilabel import Multilabel


@dataclass(frozen=True)
class SetScores:
    """Scores of counts, as scikit-learn defines them; 0 where nothing was given, or is there."""

    micro_f1: float
    """F1 of all pairs of a text and a class."""
    macro_f1: float
    """Mean of the F1 of all classes."""
    precision: tuple[float, ...]
    recall: tuple[float, ...]
    f1: tuple[float, ...]

    @classmethod
    def of(cls, counts: np.ndarray) -> "SetScores":
        """Scores of counts [K, 3]."""
        right, given, real = np.asarray(counts, np.float64).T
        ratio = lambda a, b: np.divide(a, b, out=np.zeros_like(a), where=b > 0)  # noqa: E731
        f1 = ratio(2 * right, given + real)
        micro = ratio(2 * right.sum(keepdims=True), (given + real).sum(keepdims=True))
        each = (ratio(right, given), ratio(right, real), f1)
        return cls(float(micro[0]), float(f1.mean()), *(tuple(x.tolist()) for x in each))

    def averages(self) -> dict[str, float]:
        """The averages that metrics.jsonl keeps beside the accuracy, by name."""
        return {"micro_f1": self.micro_f1, "macro_f1": self.macro_f1}


@dataclass(frozen=True, kw_only=True)
class SetLoss(TaskLoss):
    """Means over texts that may have any number of classes."""

    labels: Sequence[str]
    label_counts: np.ndarray = field(compare=False)
    """float64 [K, 3]: texts that rightly were given a class, that were given it, and that have
    it."""

    names: ClassVar[tuple[str, ...]] = (
        "source",
        "texts",
        "loss",
        "all right",
        "micro F1",
        "macro F1",
    )

    def averages(self) -> dict[str, float]:
        """Scores that metrics.jsonl keeps, by name."""
        return {"accuracy": self.accuracy} | SetScores.of(self.label_counts).averages()

    @property
    def note(self) -> str:
        """The F1 of all pairs."""
        return f"micro F1 {SetScores.of(self.label_counts).micro_f1:.3f}"

    def figures(self) -> tuple[str, ...]:
        """The columns after the loss."""
        scores = SetScores.of(self.label_counts)
        return (f"{self.accuracy:.1%}", f"{scores.micro_f1:.4f}", f"{scores.macro_f1:.4f}")

    def details(self) -> list[Table]:
        """Scores of each class."""
        scores, counts = SetScores.of(self.label_counts), self.label_counts
        head = (f"class of {self.source}", "texts", "given", "precision", "recall", "F1")
        lines = [
            (
                label,
                *(f"{count:,.0f}" for count in counts[place, :0:-1]),
                *(f"{row[place]:.1%}" for row in (scores.precision, scores.recall)),
                f"{scores.f1[place]:.4f}",
            )
            for place, label in enumerate(self.labels)
        ]
        return [table_of(head, lines)]


class SetRowTally(RowTally):
    """Tally of texts that may have any number of classes."""

    def __init__(self, objective: Multilabel):
        super().__init__(objective)
        self.counts = np.zeros((len(objective.labels), 3))

    @staticmethod
    def measure(
        model: Model, objective: Multilabel, w: Tree, batch: Batch, compute: Compute
    ) -> Any:
        """Metrics of a batch, and counts [K, 3] of its texts."""
        judged = objective.judged(model, w, batch, compute)
        real, given, there = judged.real, judged.given, judged.there
        sums = [jnp.einsum("bsk,bs->k", each, there) for each in (real * given, given, real)]
        return judged.loss.metrics | {"label_counts": (jnp.stack(sums, -1), jnp.sum(there))}

    def add(self, rows: Rows, sums: Any) -> None:
        """Counts a batch."""
        super().add(rows, sums)
        self.counts += np.asarray(sums["label_counts"][0], np.float64)

    def loss(self, source: str) -> SetLoss:
        """The scores of the source."""
        labels = self.objective.labels
        return SetLoss(source, *self.means, labels=labels, label_counts=self.counts)
