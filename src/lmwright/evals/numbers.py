"""Scores of numbers that were given to documents, beside their own."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.evals.loss import Rows, RowTally
from lmwright.evals.of_hosts import of_all_hosts
from lmwright.evals.tables import TaskLoss
from lmwright.objectives.regress import Regress
from lmwright.objectives.similarity import Similarity


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
    if np.ptp(a) == 0 or np.ptp(b) == 0:  # whose differences from their mean may be rounding
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    spread = np.sqrt((a @ a) * (b @ b))
    return float(np.clip(a @ b / spread, -1, 1)) if spread > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class NumberLoss(TaskLoss):
    """Means over texts that have a number; `loss` is the mean squared error."""

    numbers: np.ndarray = field(compare=False)
    """float64 [texts, 2]: their numbers, and the ones that were given."""

    names: ClassVar[tuple[str, ...]] = (
        "source",
        "texts",
        "squared error",
        "of the mean",
        "Pearson",
        "Spearman",
    )

    def averages(self) -> dict[str, float]:
        """Scores that metrics.jsonl keeps, by name."""
        return Fit.of(self.numbers).averages()

    @property
    def note(self) -> str:
        """The correlation of ranks."""
        return f"Spearman {Fit.of(self.numbers).spearman:.3f}"

    def figures(self) -> tuple[str, ...]:
        """The columns after the loss."""
        fit = Fit.of(self.numbers)
        return tuple(f"{value:.4f}" for value in (fit.of_mean, fit.pearson, fit.spearman))


class NumberRowTally(RowTally):
    """Tally of texts, or pairs of them, that have a number."""

    mean: ClassVar[str] = "mse"

    def __init__(self, objective: Regress | Similarity):
        super().__init__(objective)
        self.numbers = [np.zeros((0, 2))]

    @staticmethod
    def measure(
        model: Model, objective: Regress | Similarity, w: Tree, batch: Batch, compute: Compute
    ) -> Any:
        """Metrics of a batch, and [..., 3]: the number, the one that was given, and 1 for a place
        that has them."""
        judged = objective.judged(model, w, batch, compute)
        found = jnp.stack([judged.real, judged.given, judged.there], -1)
        return judged.loss.metrics | {"numbers": (found, jnp.sum(judged.there))}

    def add(self, rows: Rows, sums: Any) -> None:
        """Counts a batch, and keeps its numbers."""
        super().add(rows, sums)
        flat = of_all_hosts(sums["numbers"][0]).astype(np.float64).reshape(-1, 3)
        self.numbers.append(flat[flat[:, 2] > 0, :2])

    def loss(self, source: str) -> NumberLoss:
        """The scores of the source."""
        return NumberLoss(source, *self.means, numbers=np.concatenate(self.numbers))
