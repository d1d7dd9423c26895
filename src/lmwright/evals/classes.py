"""Scores of a classifier, all from its confusion matrix: documents [K, K] by class (rows) and by
the class that they were given (columns)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from lmwright.core.compute import Compute
from lmwright.evals.compute import compute_text
from lmwright.evals.loss import SourceLoss
from lmwright.evals.tables import of_source, table_of


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


def print_classes(
    losses: Sequence[SourceLoss],
    labels: Sequence[str],
    compute: Compute,
    console: Console | None = None,
) -> None:
    """Prints the scores of each source, of each class, and the confusion matrix."""
    console = console or Console()
    console.print(_source_table(losses))
    for loss in losses:
        if loss.confusion is not None:
            console.print()
            console.print(_class_table(loss.source, loss.confusion, labels))
    console.print(compute_text(compute), highlight=False)


def _source_table(losses: Sequence[SourceLoss]) -> Table:
    names = ("source", "texts", "loss", "accuracy", "majority", "macro F1", "Matthews")
    rows = []
    for loss in losses:
        scores = Scores.of(np.zeros((1, 1)) if loss.confusion is None else loss.confusion)
        shares = (f"{share:.1%}" for share in (scores.accuracy, scores.majority))
        rows.append(of_source(loss, *shares, f"{scores.macro_f1:.4f}", f"{scores.matthews:.4f}"))
    return table_of(names, rows)


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
