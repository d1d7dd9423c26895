"""Text classification: an encoder says which class a document is of.

Several documents share a row, each with its own label: `loss_weight` holds the number of its class
at its first token. The loss is a sum over documents, so it is the same however they are packed.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model, Objective, Work
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.models import KINDS
from lmwright.models.classifier import Classifier, document_sums, first_tokens
from lmwright.models.heads import HEAD, Pooling

CONFUSION = "confusion"


@section
class Classify(Objective):
    """One class for each document."""

    kind: Literal["classify"] = "classify"
    labels: Annotated[tuple[str, ...], Field(min_length=2)]
    """The classes, each once; their places are their numbers."""
    pooling: Pooling | None = None
    """How tokens of a document come together: `late` averages the logits of each, `mean` its
    hidden states; `bos` or `cls` takes its first token alone. What the model's family does if
    unset."""

    both_ways: ClassVar[bool] = True
    learns_from: ClassVar[str] = "labeled texts"
    new_weights: ClassVar[tuple[str, ...]] = (HEAD,)

    def __post_init__(self) -> None:
        if twice := [name for name in self.labels if self.labels.count(name) > 1]:
            raise UserError(f"objective.labels: {twice[0]!r} is there twice; name each class once")
        if untidy := [name for name in self.labels if name != name.strip() or not name]:
            raise UserError(
                f"objective.labels: {untidy[0]!r} is empty or has blanks around it; remove them"
            )

    def classifier(self, model: Model) -> Classifier:
        """The encoder with its head over documents. Raises UserError for one that has none, or
        not with this pooling."""
        head = getattr(model, "document_head", None)
        if head is None:
            known = [name for name, family in KINDS.items() if hasattr(family, "document_head")]
            raise UserError(
                f"model.kind: {model.kind!r} has no head for classes here; use "
                f"{' or '.join(map(repr, known))}"
            )
        pooling = self.pooling or head.poolings[0]
        if pooling not in head.poolings:
            raise UserError(
                f"objective.pooling: {pooling!r} is not one of {model.kind}; use "
                f"{' or '.join(map(repr, head.poolings))}"
            )
        return Classifier(model, self.labels, pooling)

    def spec(self, model: Model) -> Tree:
        """The encoder's weights without its head, and those of the head over documents."""
        return self.classifier(model).spec()

    def works(self, model: Model, seq_len: int) -> Mapping[str, Work]:
        """The work of the classifier, which has no logits over the vocabulary."""
        return {"": self.classifier(model).work(seq_len)}

    def exported(self, model: Model, w: Tree) -> tuple[Model, Tree]:
        """The classifier, and its weights."""
        return self.classifier(model), w

    def for_eval(self) -> "Classify":
        """The objective on held-out rows, which also counts each pair of classes."""
        return _HeldOut(**vars(self))

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Cross-entropy summed over documents; `key` is unused, nothing is sampled."""
        classifier = self.classifier(model)
        logits, aux = classifier.classify(w, batch, compute)
        first, ids = first_tokens(batch), batch.segment_ids
        there = document_sums(first, ids)  # [B, T]: 1 for each document
        label = document_sums(first * batch.loss_weight, ids).astype(jnp.int32)
        chosen = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
        nll = jnp.sum((jax.nn.logsumexp(logits, axis=-1) - chosen) * there)
        weight = jnp.sum(there)
        guess = jnp.argmax(logits, axis=-1)
        metrics = {
            "nll": (nll, weight),
            "accuracy": (jnp.sum((guess == label) * there), weight),
            **self.counts(label, guess, there),
        }
        added, more = classifier.penalties(aux)
        return Loss(nll + added * weight, weight, metrics | more)

    def counts(self, label: Array, guess: Array, there: Array) -> dict[str, tuple[Array, Array]]:
        """Further metrics, from numbers of classes [B, T] of the documents that are `there`."""
        return {}


class _HeldOut(Classify):
    """As held-out rows are measured."""

    def counts(self, label: Array, guess: Array, there: Array) -> dict[str, tuple[Array, Array]]:
        """Documents by class (rows) and by the class that they were given (columns)."""
        k = len(self.labels)
        real, given = jax.nn.one_hot(label, k), jax.nn.one_hot(guess, k)
        pairs = (real * there[..., None]).reshape(-1, k).T @ given.reshape(-1, k)
        return {CONFUSION: (pairs, jnp.sum(there))}
