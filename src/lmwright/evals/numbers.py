"""Scores of numbers that were given to documents, beside their own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from lmwright.core.compute import Compute
from lmwright.evals.loss import SourceLoss
from lmwright.evals.tables import of_source, print_table, table_of


@dataclass(frozen=True)
class Fit:
    """Errors and correlations of numbers, as scipy and scikit-learn define them."""

    mse: float
    """Mean squared error."""
    of_mean: float
    """Mean squared error of giving every document the mean."""
    pearson: float
    """Correlation, 0 where all numbers of a side are equal."""
    spearman: float
    """Correlation of ranks, of which equal numbers share their mean."""

    @classmethod
    def of(cls, pairs: np.ndarray) -> "Fit":
        """Scores of [documents, 2]: their numbers, and the ones that were given."""
        if not len(pairs):
            return cls(0.0, 0.0, 0.0, 0.0)
        real, given = np.asarray(pairs, np.float64).T
        return cls(
            mse=float(np.mean((real - given) ** 2)),
            of_mean=float(np.var(real)),
            pearson=_correlation(real, given),
            spearman=_correlation(ranks(real), ranks(given)),
        )

    def averages(self) -> dict[str, float]:
        """The averages that metrics.jsonl keeps beside the loss, by name."""
        return {"pearson": self.pearson, "spearman": self.spearman}


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    spread = np.sqrt((a @ a) * (b @ b))
    return float(np.clip(a @ b / spread, -1, 1)) if spread > 0 else 0.0


def print_numbers(
    losses: Sequence[SourceLoss], compute: Compute, console: Console | None = None
) -> None:
    """Prints the scores of each source."""
    names = ("source", "texts", "squared error", "of the mean", "Pearson", "Spearman")
    rows = []
    for loss in losses:
        fit = Fit.of(np.zeros((0, 2)) if loss.numbers is None else loss.numbers)
        values = (fit.of_mean, fit.pearson, fit.spearman)
        rows.append(of_source(loss, *(f"{value:.4f}" for value in values)))
    print_table(table_of(names, rows), compute, console)
