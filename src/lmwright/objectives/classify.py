"""Text classification: an encoder says which class a document is of.

The label of a document is the number of its class.
"""

from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model
from lmwright.core.param import Tree
from lmwright.objectives.class_loss import (
    ClassWeights,
    Smoothing,
    check_weights,
    judged_classes,
)
from lmwright.objectives.documents import AnyPooling, Judged, OverDocuments, check_labels


@section
class Classify(OverDocuments):
    """One class for each document."""

    kind: Literal["classify"] = "classify"
    labels: Annotated[tuple[str, ...], Field(min_length=2)]
    """The classes, in the order of their numbers."""
    pooling: AnyPooling = None
    class_weights: ClassWeights = ()
    label_smoothing: Smoothing = 0.0

    learns_from: ClassVar[str] = "labeled texts"
    tally: ClassVar[str] = "classes.ClassRowTally"

    def __post_init__(self) -> None:
        check_labels(self.labels, "class")
        check_weights("class_weights", self.class_weights, self.labels)

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Cross-entropy summed over documents; `key` is unused, nothing is sampled."""
        return self.judged(model, w, batch, compute).loss

    def judged(self, model: Model, w: Tree, batch: Batch, compute: Compute) -> Judged:
        """The loss, and the number of each document's class [B, S] and of the one it is given."""
        scored = self.scored(model, w, batch, compute)
        label = scored.label.astype(jnp.int32)
        return judged_classes(
            self.model_over(model), scored.aux, scored.scores, label, scored.there,
            self.class_weights, self.label_smoothing,
        )  # fmt: skip
