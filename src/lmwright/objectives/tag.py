"""Token tags: an encoder says which tag each word of a text has, such as parts of names.

A word's tag stands at its first token, as in transformers: `loss_weight` is its number plus 1
there, and 0 at every other token. Losses are sums over words, so they are the same however texts
are packed.
"""

from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.rows import TAGGED_WORDS
from lmwright.config.run import section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model
from lmwright.core.param import Tree
from lmwright.models.heads import HEAD, document_head_of
from lmwright.models.tagger import Tagger
from lmwright.objectives.class_loss import (
    ClassWeights,
    Smoothing,
    check_weights,
    judged_classes,
)
from lmwright.objectives.documents import Judged, check_labels
from lmwright.objectives.over import OverObjective, unsuited


@section
class Tag(OverObjective):
    """A tag for each word."""

    kind: Literal["tag"] = "tag"
    labels: Annotated[tuple[str, ...], Field(min_length=2)]
    """The tags, each once; their places are their numbers. Names of entities are in BIO: "O",
    "B-PER", "I-PER"."""
    class_weights: ClassWeights = ()
    label_smoothing: Smoothing = 0.0

    new_weights: ClassVar[tuple[str, ...]] = (HEAD,)
    learns_from: ClassVar[str] = TAGGED_WORDS
    tally: ClassVar[str] = "tagged.TagRowTally"

    def __post_init__(self) -> None:
        check_labels(self.labels, "tag")
        check_weights("class_weights", self.class_weights, self.labels)

    def model_over(self, encoder: Model) -> Tagger:
        """The encoder with its layer of scores. Raises UserError for a model that has none."""
        if document_head_of(encoder) is None:
            raise unsuited(encoder, "cannot give tags", document_head_of)
        return Tagger(encoder, self.labels)

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Cross-entropy summed over words; `key` is unused, nothing is sampled."""
        return self.judged(model, w, batch, compute).loss

    def judged(self, model: Model, w: Tree, batch: Batch, compute: Compute) -> Judged:
        """The loss, and the numbers of the tags [B, T] that words have and are given, each at its
        first token."""
        tagger = self.model_over(model)
        x, aux = tagger.hidden(w, batch, compute)
        logits = tagger.logits(w, x)
        there = (batch.loss_weight > 0).astype(jnp.float32)
        tag = jnp.maximum(batch.loss_weight.astype(jnp.int32) - 1, 0)
        return judged_classes(
            tagger, aux, logits, tag, there, self.class_weights, self.label_smoothing
        )
