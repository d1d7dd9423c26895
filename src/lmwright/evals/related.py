"""Ranks of held-out texts that belong together, by their vectors, among all texts of their source.

    rows --encoder--> vectors of all texts --cosine--> rank of each anchor's positive

Texts that are no negatives in training, since they equal the anchor or its positive, have no rank
here either. Of equal scores, the others come first.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.evals.loss import Rows, RowTally
from lmwright.evals.tables import TaskLoss
from lmwright.objectives.embed import Embed, Texts

BLOCK = 512  # anchors whose scores are in memory at a time
WITHIN = 10  # ranks that count in the mean of their inverses


@dataclass(frozen=True, kw_only=True)
class RelatedLoss(TaskLoss):
    """Means over pairs of texts that belong together; `accuracy` is that at rank 1."""

    mrr: float
    """Mean of the inverse rank of what belongs to a text, 0 beyond the tenth."""

    names: ClassVar[tuple[str, ...]] = (
        "source",
        "pairs",
        "loss",
        "accuracy at 1",
        f"MRR at {WITHIN}",
    )

    def averages(self) -> dict[str, float]:
        """Scores that metrics.jsonl keeps, by name."""
        return {"accuracy_at_1": self.accuracy, f"mrr_at_{WITHIN}": self.mrr}

    @property
    def note(self) -> str:
        """The accuracy."""
        return f"accuracy {self.accuracy:.1%}"

    def figures(self) -> tuple[str, ...]:
        """The columns after the loss."""
        return (f"{self.accuracy:.1%}", f"{self.mrr:.4f}")


class RelatedRowTally(RowTally):
    """Tally of pairs of texts that belong together."""

    def __init__(self, objective: Embed):
        super().__init__(objective)
        self.texts: list[Texts] = []
        """Texts of each batch, on the host."""

    @staticmethod
    def measure(model: Model, objective: Embed, w: Tree, batch: Batch, compute: Compute) -> Texts:
        """The texts of a batch."""
        found = objective.texts(objective.model_over(model), w, batch, compute)[0]
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return found
        whole = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec())  # noqa: E731
        return jax.tree.map(whole, found)  # on every host

    def add(self, rows: Rows, sums: Any) -> None:
        """Keeps the texts of a batch."""
        self.texts.append(jax.device_get(sums))

    def loss(self, source: str) -> RelatedLoss:
        """Loss, accuracy at rank 1 and mean reciprocal rank over the pairs of all batches."""
        there = np.concatenate([texts.there.ravel() for texts in self.texts])
        vectors, anchor, marks = (
            np.concatenate([x.reshape(-1, *x.shape[2:]) for x in each])[there]
            for each in zip(*((t.vectors, t.anchor, t.marks) for t in self.texts), strict=True)
        )
        at = np.flatnonzero(anchor)
        loss, ranks = rank(vectors, at, marks, self.objective.temperature)
        count = max(len(at), 1)
        inverse = np.where(ranks <= WITHIN, 1 / np.maximum(ranks, 1), 0.0)
        accuracy, mrr = float(np.sum(ranks == 1)) / count, float(inverse.sum()) / count
        return RelatedLoss(source, loss / count, accuracy, len(at), mrr=mrr)


def rank(
    vectors: np.ndarray, at: np.ndarray, marks: np.ndarray, temperature: float
) -> tuple[float, np.ndarray]:
    """The loss summed over anchors, and the rank, from 1, of what belongs to each.

    vectors: float32 [N, D]; at: int [M], places of anchors, behind each of which is what belongs to
    it; marks: uint32 [N, 2], the same for the same text.
    """
    square = np.sum(vectors * vectors, axis=1, keepdims=True, dtype=np.float64)
    unit = vectors / np.sqrt(np.maximum(square, 1e-24))
    names = np.unique(marks, axis=0, return_inverse=True)[1].ravel()  # a number for each text
    owner = np.full(len(names), -1)
    owner[at + 1] = names[at]
    others = np.ones(len(names), bool)
    others[at] = False
    loss, ranks = 0.0, np.zeros(len(at), np.int64)
    for start in range(0, len(at), BLOCK):
        mine = at[start : start + BLOCK]
        scores = unit[mine] @ unit.T
        own = np.take_along_axis(scores, mine[:, None] + 1, 1)
        a, p = names[mine][:, None], names[mine + 1][:, None]
        seen = others & (names != a) & (names != p) & (owner != a)
        ranks[start : start + BLOCK] = 1 + np.sum(seen & (scores >= own), axis=1)
        odds = np.where(seen, np.exp((scores - own) / temperature), 0.0)
        loss += float(np.sum(np.log1p(odds.sum(axis=1))))
    return loss, ranks
