"""Scores of classes of which a text may have any number, all from counts [K, 3] of texts that
rightly were given a class, those that were given it, and those that have it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from lmwright.core.compute import Compute
from lmwright.evals.compute import compute_text
from lmwright.evals.loss import SourceLoss
from lmwright.evals.tables import of_source, table_of


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


def print_label_sets(
    losses: Sequence[SourceLoss],
    labels: Sequence[str],
    compute: Compute,
    console: Console | None = None,
) -> None:
    """Prints the scores of each source, and of each class."""
    console = console or Console()
    names = ("source", "texts", "loss", "all right", "micro F1", "macro F1")
    rows, classes = [], []
    for loss in losses:
        counts = np.zeros((len(labels), 3)) if loss.label_counts is None else loss.label_counts
        scores = SetScores.of(counts)
        f1 = (f"{scores.micro_f1:.4f}", f"{scores.macro_f1:.4f}")
        rows.append(of_source(loss, f"{loss.accuracy:.1%}", *f1))
        head = (f"class of {loss.source}", "texts", "given", "precision", "recall", "F1")
        lines = [
            (
                label,
                *(f"{count:,.0f}" for count in counts[place, :0:-1]),
                *(f"{row[place]:.1%}" for row in (scores.precision, scores.recall)),
                f"{scores.f1[place]:.4f}",
            )
            for place, label in enumerate(labels)
        ]
        classes.append(table_of(head, lines))
    console.print(table_of(names, rows))
    for table in classes:
        console.print()
        console.print(table)
    console.print(compute_text(compute), highlight=False)
