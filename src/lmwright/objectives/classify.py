"""Text classification: an encoder says which class a document is of.

The label of a document is the number of its class.
"""

from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model
from lmwright.core.param import Tree
from lmwright.objectives.documents import AnyPooling, OverDocuments, check_labels

CONFUSION = "confusion"


@section
class Classify(OverDocuments):
    """One class for each document."""

    kind: Literal["classify"] = "classify"
    labels: Annotated[tuple[str, ...], Field(min_length=2)]
    """The classes, in the order of their numbers."""
    pooling: AnyPooling = None

    learns_from: ClassVar[str] = "labeled texts"

    def __post_init__(self) -> None:
        check_labels(self.labels, "class")

    def for_eval(self) -> "Classify":
        """The objective on held-out rows, which also counts each pair of classes."""
        return _HeldOut(**vars(self))

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Cross-entropy summed over documents; `key` is unused, nothing is sampled."""
        scored = self.scored(model, w, batch, compute)
        logits, there, label = scored.scores, scored.there, scored.label.astype(jnp.int32)
        chosen = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
        nll = jnp.sum((jax.nn.logsumexp(logits, axis=-1) - chosen) * there)
        weight = jnp.sum(there)
        guess = jnp.argmax(logits, axis=-1)
        metrics = {
            "nll": (nll, weight),
            "accuracy": (jnp.sum((guess == label) * there), weight),
            **self.counts(label, guess, there),
        }
        added, more = self.classifier(model).penalties(scored.aux)
        return Loss(nll + added * weight, weight, metrics | more)

    def counts(self, label: Array, guess: Array, there: Array) -> dict[str, tuple[Array, Array]]:
        """Further metrics, from numbers of classes [B, T] of the documents that are `there`."""
        return {}


class _HeldOut(Classify):
    """`Classify` as measured on held-out rows."""

    def counts(self, label: Array, guess: Array, there: Array) -> dict[str, tuple[Array, Array]]:
        """Counts of documents by class (rows) and by the class that they were given (columns)."""
        k = len(self.labels)
        real, given = jax.nn.one_hot(label, k), jax.nn.one_hot(guess, k)
        pairs = (real * there[..., None]).reshape(-1, k).T @ given.reshape(-1, k)
        return {CONFUSION: (pairs, jnp.sum(there))}
