"""Scores of held-out words that have tags."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.evals.entities import entity_counts, f1_of
from lmwright.evals.loss import Rows, RowTally
from lmwright.evals.of_hosts import of_all_hosts
from lmwright.evals.tables import TaskLoss
from lmwright.objectives.tag import Tag


@dataclass(frozen=True, kw_only=True)
class TagLoss(TaskLoss):
    """Means over words that have tags."""

    entities: np.ndarray = field(compare=False)
    """float64 [3]: entities that are right, were given, and are there."""

    names: ClassVar[tuple[str, ...]] = ("source", "words", "loss", "accuracy", "entity F1")

    @property
    def entity_f1(self) -> float:
        """F1 of entities, as seqeval's."""
        return f1_of(self.entities)

    def averages(self) -> dict[str, float]:
        """Scores that metrics.jsonl keeps, by name."""
        return {"accuracy": self.accuracy, "entity_f1": self.entity_f1}

    @property
    def note(self) -> str:
        """The accuracy of words, and the F1 of entities."""
        return f"accuracy {self.accuracy:.1%}, entity F1 {self.entity_f1:.3f}"

    def figures(self) -> tuple[str, ...]:
        """The columns after the loss."""
        return (f"{self.accuracy:.1%}", f"{self.entity_f1:.4f}")


class TagRowTally(RowTally):
    """Tally of words that have tags."""

    def __init__(self, objective: Tag):
        super().__init__(objective)
        self.entities = np.zeros(3)

    @staticmethod
    def measure(model: Model, objective: Tag, w: Tree, batch: Batch, compute: Compute) -> Any:
        """Metrics of a batch, and int [B, T, 3]: the tag, the one that was given, and the number of
        the document in its row where a word begins, else 0."""
        judged = objective.judged(model, w, batch, compute)
        document = batch.segment_ids * (judged.there > 0)
        found = jnp.stack([judged.real, judged.given, document], -1)
        return judged.loss.metrics | {"tags": (found, jnp.sum(judged.there))}

    def add(self, rows: Rows, sums: Any) -> None:
        """Counts a batch, and its entities."""
        super().add(rows, sums)
        found = of_all_hosts(sums["tags"][0])
        self.entities = self.entities + _entities(found, self.objective.labels)

    def loss(self, source: str) -> TagLoss:
        """The scores of the source."""
        return TagLoss(source, *self.means, entities=self.entities)


def _entities(rows: np.ndarray, labels: Sequence[str]) -> np.ndarray:
    """float64 [3]: counts of entities in rows [B, T, 3], as `TagRowTally.measure` gives them."""
    real, given = [], []
    for row in rows:
        for document in range(1, int(row[:, 2].max(initial=0)) + 1):
            words = row[row[:, 2] == document]
            real.append([labels[int(tag)] for tag in words[:, 0]])
            given.append([labels[int(tag)] for tag in words[:, 1]])
    return entity_counts(real, given)
