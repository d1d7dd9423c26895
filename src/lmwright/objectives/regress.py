"""Text regression: an encoder gives a document, or a pair of texts, a number.

The loss is the squared error, summed over documents.
"""

from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from lmwright.config.run import section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model
from lmwright.core.param import Tree
from lmwright.objectives.clm import with_penalties
from lmwright.objectives.documents import AnyPooling, Judged, OverDocuments


@section
class Regress(OverDocuments):
    """A number for each document."""

    kind: Literal["regress"] = "regress"
    pooling: AnyPooling = None

    labels: ClassVar[tuple[str, ...]] = ()  # type: ignore[misc]
    learns_from: ClassVar[str] = "texts with a number"
    tally: ClassVar[str] = "numbers.NumberRowTally"

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Squared errors summed over documents; `key` is unused, nothing is sampled."""
        return self.judged(model, w, batch, compute).loss

    def judged(self, model: Model, w: Tree, batch: Batch, compute: Compute) -> Judged:
        """The loss, and the numbers [B, S] that documents have and are given."""
        scored = self.scored(model, w, batch, compute)
        score, there = scored.scores[..., 0], scored.there
        total, weight = jnp.sum(jnp.square(score - scored.label) * there), jnp.sum(there)
        loss = Loss(total, weight, {"mse": (total, weight)})
        loss = with_penalties(loss, self.model_over(model), scored.aux)
        return Judged(loss, scored.label, score, there)
