"""Scores of a classifier, all from its confusion matrix: documents [K, K] by class (rows) and by
the class that they were given (columns)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.evals.loss import Rows, RowTally
from lmwright.evals.tables import TaskLoss, table_of
from lmwright.objectives.classify import Classify


@dataclass(frozen=True)
class Scores:
    """Scores of a confusion matrix, as scikit-learn defines them."""

    accuracy: float
    majority: float
    """Accuracy of giving every document its most frequent class."""
    macro_f1: float
    """Mean of the F1 of each class that occurs or was given."""
    matthews: float
    """Matthews correlation of several classes (https://doi.org/10.1016/j.compbiolchem.2004.09.006),
    0 where all documents have one class, or were given one."""
    precision: tuple[float, ...]
    """Precision of each class; 0 for one that was never given."""
    recall: tuple[float, ...]
    """Recall of each class; 0 for one that never occurs."""
    f1: tuple[float, ...]

    @classmethod
    def of(cls, confusion: np.ndarray) -> "Scores":
        """Scores of a matrix of counts [K, K]."""
        counts = np.asarray(confusion, np.float64)
        right, real, given = np.diag(counts), counts.sum(1), counts.sum(0)
        total = max(counts.sum(), 1.0)
        ratio = lambda a, b: np.divide(a, b, out=np.zeros_like(a), where=b > 0)  # noqa: E731
        f1 = ratio(2 * right, real + given)
        seen = (real + given) > 0
        spread = np.sqrt((total**2 - real @ real) * (total**2 - given @ given))
        return cls(
            accuracy=float(right.sum() / total),
            majority=float(real.max() / total),
            macro_f1=float(f1[seen].mean()) if seen.any() else 0.0,
            matthews=float((right.sum() * total - real @ given) / spread) if spread else 0.0,
            precision=tuple(ratio(right, given).tolist()),
            recall=tuple(ratio(right, real).tolist()),
            f1=tuple(f1.tolist()),
        )

    def averages(self) -> dict[str, float]:
        """The averages that metrics.jsonl keeps, by name."""
        return {
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "matthews": self.matthews,
        }


@dataclass(frozen=True, kw_only=True)
class ClassLoss(TaskLoss):
    """Means over texts that are put into classes."""

    labels: Sequence[str]
    confusion: np.ndarray = field(compare=False)
    """Texts [K, K] by class and by the class that they were given."""

    names: ClassVar[tuple[str, ...]] = (
        "source",
        "texts",
        "loss",
        "accuracy",
        "majority",
        "macro F1",
        "Matthews",
    )

    def averages(self) -> dict[str, float]:
        """Scores that metrics.jsonl keeps, by name."""
        return Scores.of(self.confusion).averages()

    @property
    def note(self) -> str:
        """The accuracy."""
        return f"accuracy {self.accuracy:.1%}"

    def figures(self) -> tuple[str, ...]:
        """The columns after the loss."""
        scores = Scores.of(self.confusion)
        shares = (f"{share:.1%}" for share in (scores.accuracy, scores.majority))
        return (*shares, f"{scores.macro_f1:.4f}", f"{scores.matthews:.4f}")

    def details(self) -> list[Table]:
        """Scores of each class, with the confusion matrix."""
        return [_class_table(self.source, self.confusion, self.labels)]


class ClassRowTally(RowTally):
    """Tally of texts that are put into classes."""

    def __init__(self, objective: Classify):
        super().__init__(objective)
        self.confusion = np.zeros((len(objective.labels),) * 2)

    @staticmethod
    def measure(model: Model, objective: Classify, w: Tree, batch: Batch, compute: Compute) -> Any:
        """Metrics of a batch, and its texts by class (rows) and by the class that they were given
        (columns)."""
        judged, k = objective.judged(model, w, batch, compute), len(objective.labels)
        real, given = jax.nn.one_hot(judged.real, k), jax.nn.one_hot(judged.given, k)
        pairs = (real * judged.there[..., None]).reshape(-1, k).T @ given.reshape(-1, k)
        return judged.loss.metrics | {"confusion": (pairs, jnp.sum(judged.there))}

    def add(self, rows: Rows, sums: Any) -> None:
        """Counts a batch."""
        super().add(rows, sums)
        self.confusion += np.asarray(sums["confusion"][0])

    def loss(self, source: str) -> ClassLoss:
        """The scores of the source."""
        labels = self.objective.labels
        return ClassLoss(source, *self.means, labels=labels, confusion=self.confusion)


def _class_table(source: str, confusion: np.ndarray, labels: Sequence[str]) -> Table:
    """One row a class: its scores, and how many of its texts were given each class."""
    scores = Scores.of(confusion)
    given = [f"as {label}" for label in labels]
    names = (f"class of {source}", "texts", "precision", "recall", "F1", *given)
    rows = [
        (
            label,
            f"{confusion[place].sum():,.0f}",
            *(f"{row[place]:.1%}" for row in (scores.precision, scores.recall)),
            f"{scores.f1[place]:.4f}",
            *(f"{count:,.0f}" for count in confusion[place]),
        )
        for place, label in enumerate(labels)
    ]
    return table_of(names, rows)
