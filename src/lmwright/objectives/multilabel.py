"""Multi-label classification: an encoder says of each class whether a document has it.

The classes of a document stand beside its tokens as bits, those of the first 16 at its first
token. The loss of a document is the mean of the binary cross-entropies of its classes, as
transformers' of `problem_type = "multi_label_classification"`.
"""

from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.rows import ANY_LABELS, CLASSES_PER_TOKEN
from lmwright.config.run import section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model
from lmwright.core.param import Tree
from lmwright.models.classifier import PerText, document_sums
from lmwright.objectives.class_loss import PositiveWeights, check_weights
from lmwright.objectives.clm import with_penalties
from lmwright.objectives.documents import AnyPooling, Judged, OverDocuments, check_labels


@section
class Multilabel(OverDocuments):
    """Any number of classes for each document."""

    kind: Literal["multilabel"] = "multilabel"
    labels: Annotated[tuple[str, ...], Field(min_length=2)]
    """The classes, in the order of their numbers."""
    pooling: AnyPooling = None
    positive_weights: PositiveWeights = ()

    per_text: ClassVar[PerText] = "any"
    learns_from: ClassVar[str] = ANY_LABELS
    tally: ClassVar[str] = "label_sets.SetRowTally"

    def __post_init__(self) -> None:
        check_labels(self.labels, "class")
        check_weights("positive_weights", self.positive_weights, self.labels)

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Mean cross-entropy of the classes summed over documents; `key` is unused, nothing is
        sampled."""
        return self.judged(model, w, batch, compute).loss

    def judged(self, model: Model, w: Tree, batch: Batch, compute: Compute) -> Judged:
        """The loss, and the classes float32 [B, S, K] that documents have and are given."""
        scored = self.scored(model, w, batch, compute)
        logits, there = scored.scores, scored.there
        real = label_bits(batch, len(self.labels))
        nll = jax.nn.softplus(logits) - logits * real  # of a class that is or is not there
        mean, weight = jnp.sum(jnp.mean(nll, axis=-1) * there), jnp.sum(there)
        total = mean
        if self.positive_weights:
            heavier = nll * jnp.where(real > 0, jnp.asarray(self.positive_weights), 1.0)
            total = jnp.sum(jnp.mean(heavier, axis=-1) * there)
        given = (logits > 0).astype(jnp.float32)
        metrics = {
            "nll": (mean, weight),
            "accuracy": (jnp.sum(jnp.all(given == real, axis=-1) * there), weight),
        }
        loss = Loss(total, weight, metrics)
        loss = with_penalties(loss, self.model_over(model), scored.aux)
        return Judged(loss, real, given, there)


def label_bits(batch: Batch, count: int) -> Array:
    """float32 [B, S, K]: 1 for each of `count` classes that a document has."""
    words = [
        document_sums(jnp.where(batch.positions == place, batch.loss_weight, 0), batch.segment_ids)
        for place in range(-(-count // CLASSES_PER_TOKEN))
    ]
    number = jnp.arange(count)
    word = jnp.stack(words, -1)[..., number // CLASSES_PER_TOKEN].astype(jnp.int32)
    return (word >> (number % CLASSES_PER_TOKEN) & 1).astype(jnp.float32)
