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
from lmwright.objectives.documents import AnyPooling, OverDocuments

NUMBERS = "numbers"


@section
class Regress(OverDocuments):
    """A number for each document."""

    kind: Literal["regress"] = "regress"
    pooling: AnyPooling = None

    labels: ClassVar[tuple[str, ...]] = ()  # type: ignore[misc]
    learns_from: ClassVar[str] = "texts with a number"

    def for_eval(self) -> "Regress":
        """The objective on held-out rows, which also gives the numbers themselves."""
        return _HeldOut(**vars(self))

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Squared errors summed over documents; `key` is unused, nothing is sampled."""
        scored = self.scored(model, w, batch, compute)
        score, there = scored.scores[..., 0], scored.there
        total, weight = jnp.sum(jnp.square(score - scored.label) * there), jnp.sum(there)
        metrics = {"mse": (total, weight), **self.numbers(score, scored.label, there)}
        added, more = self.classifier(model).penalties(scored.aux)
        return Loss(total + added * weight, weight, metrics | more)

    def numbers(self, score: Array, label: Array, there: Array) -> dict[str, tuple[Array, Array]]:
        """Further metrics, from numbers [B, S] of the documents that are `there`."""
        return {}


class _HeldOut(Regress):
    """`Regress` as measured on held-out rows."""

    def numbers(self, score: Array, label: Array, there: Array) -> dict[str, tuple[Array, Array]]:
        """[B, S, 3]: the number, the one that was given, and 1 for a document that is there."""
        return {NUMBERS: (jnp.stack([label, score, there], -1), jnp.sum(there))}
