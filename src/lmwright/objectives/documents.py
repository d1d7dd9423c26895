"""Objectives over documents: what those share that learn a label of each document.

Several documents share a row, each with its own label: `loss_weight` holds it at the first token of
its document. Losses are sums over documents, so they are the same however these are packed.
"""

from typing import Annotated, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.errors import UserError
from lmwright.models.classifier import Classifier, PerText, document_sums, first_tokens
from lmwright.models.heads import HEAD, Pooling, document_head_of
from lmwright.objectives.over import OverObjective, unsuited

AnyPooling = Annotated[
    Pooling | None,
    Field(
        description="How tokens of a document come together: `late` averages the scores of each, "
        "`mean` its hidden states; `bos` or `cls` takes its first token alone. What the model's "
        "family does if unset."
    ),
]


def check_labels(labels: tuple[str, ...], called: str) -> None:
    """Raises UserError for a label that occurs twice, is empty, or has spaces around it."""
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise UserError(f"objective.labels: {twice[0]!r} occurs twice; list each {called} once")
    if untidy := [name for name in labels if name != name.strip() or not name]:
        raise UserError(
            f"objective.labels: {untidy[0]!r} is empty or has spaces around it; remove them"
        )


class Scored(NamedTuple):
    """The documents of a batch and their scores; S is the number of tokens of a row."""

    scores: Array
    """float32 [B, S, K]"""
    label: Array
    """float32 [B, S]"""
    there: Array
    """float32 [B, S]: 1 for each document, else 0."""
    aux: Aux


class Judged(NamedTuple):
    """The loss of a batch, and what its documents, pairs or words have and were given."""

    loss: Loss
    real: Array
    given: Array
    there: Array
    """float32: 1 for each of them, 0 for places that are left over."""


class OverDocuments(OverObjective):
    """An objective that trains an encoder with a head over documents."""

    labels: tuple[str, ...]
    pooling: Pooling | None

    per_text: ClassVar[PerText] = "one"
    """Number of classes of a text."""
    new_weights: ClassVar[tuple[str, ...]] = (HEAD,)

    def model_over(self, encoder: Model) -> Classifier:
        """The encoder with its head over documents. Raises UserError for one that has none, or
        not with this pooling."""
        head = document_head_of(encoder)
        if head is None:
            raise unsuited(encoder, "has no head over documents here", document_head_of)
        pooling = self.pooling or head.poolings[0]
        if pooling not in head.poolings:
            raise UserError(
                f"objective.pooling: {pooling!r} is not one of {encoder.kind}; use "
                f"{' or '.join(map(repr, head.poolings))}"
            )
        return Classifier(encoder, self.labels, pooling, self.per_text)

    def scored(self, model: Model, w: Tree, batch: Batch, compute: Compute) -> Scored:
        """Documents of a batch with their scores."""
        scores, aux = self.model_over(model).classify(w, batch, compute)
        first, ids = first_tokens(batch), batch.segment_ids
        label = document_sums(first * batch.loss_weight, ids)
        return Scored(scores, label, document_sums(jnp.asarray(first), ids), aux)
