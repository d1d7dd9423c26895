"""Classifier: an encoder that scores documents, by a head in place of the one over its vocabulary:
a logit for each class, or one number.

    x [B, T, D] --pool--> [B, S, D] --head--> logits [B, S, K]     "bos", "cls", "mean"
    x [B, T, D] --head--> [B, T, K] --pool--> logits [B, S, K]     "late"

Each segment of a packed row is a document. The head is that of the family's
ForSequenceClassification in transformers (`models.heads`). In shapes, K are the scores and S the
documents of a row, as many as it has tokens; those that are not there have logits without meaning.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.models.heads import HEAD, Pooling, left_out, scores
from lmwright.models.hf.classifier import CLASSIFIER
from lmwright.models.over import OverEncoder

PerText = Literal["one", "any"]


@dataclass(frozen=True)
class Classifier(OverEncoder):
    """An encoder without its head, and the head over documents."""

    hf: ClassVar = CLASSIFIER
    called: ClassVar[str] = "a classifier"
    task: ClassVar[str] = "text-classification"
    saves_head: ClassVar[bool] = True

    labels: tuple[str, ...]
    """The classes; none where the score is a number."""
    pooling: Pooling
    per_text: PerText = "one"
    """Number of classes of a text."""

    def note(self) -> dict[str, Any]:
        """The classes, the pooling, whether the encoder has no other, and how many classes a text
        has, where that is not one."""
        more: dict[str, Any] = {"per_text": self.per_text} if self.per_text != "one" else {}
        if len(self.encoder.document_head.poolings) == 1:
            more["only_pooling"] = True
        return {"labels": self.labels, "pooling": self.pooling} | more

    def spec(self) -> Tree:
        """Every weight, once."""
        spec = self.encoder.spec()
        dropped = left_out(self.encoder)
        head = self.encoder.document_head.spec(self.encoder.embed_dim, max(1, len(self.labels)))
        return {name: tree for name, tree in spec.items() if name not in dropped} | {HEAD: head}

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        return self.encoder.document_head.weights(w)

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [B, T, K] for hidden [B, T, D], be it pooled already or not."""
        return scores(w, self.encoder.document_head.transformed(self.encoder, w, hidden))

    def classify(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """Logits float32 [B, T, K] of the documents of each row, the first T of them, and sums of
        the layers."""
        x, aux = self.hidden(w, batch, compute)
        x, ids = constrain(x, "batch seq embed"), batch.segment_ids
        if self.pooling == "late":
            return document_means(self.logits(w, x), ids), aux
        if self.pooling == "mean":
            pooled = document_means(x, ids)
        else:
            pooled = document_sums(x * first_tokens(batch)[..., None], ids)
        return self.logits(w, pooled.astype(x.dtype)), aux

    def compared(self, w: Tree, batch: Batch, compute: Compute) -> Array:
        """float32 [B, 1, K]: the scores of whole rows, each a document."""
        return self.classify(w, batch, compute)[0][:, :1]


def first_tokens(batch: Batch) -> Array:
    """float32 [B, T]: 1 for the first token of each document."""
    return ((batch.positions == 0) & (batch.segment_ids > 0)).astype(jnp.float32)


def document_sums(values: Array, segment_ids: Array) -> Array:
    """float32 [B, T, ...]: sums of `values` [B, T, ...] over each of the documents of its row."""
    t = segment_ids.shape[1]
    ids = jnp.where(segment_ids > 0, segment_ids - 1, t)  # in order: padding is behind
    add = lambda row, at: jax.ops.segment_sum(row, at, t + 1, indices_are_sorted=True)[:t]  # noqa: E731
    return jax.vmap(add)(values.astype(jnp.float32), ids)


def document_means(values: Array, segment_ids: Array) -> Array:
    """float32 [B, T, ...]: means of `values` [B, T, ...] over the tokens of each document, 0 for
    documents that are not there."""
    count = document_sums(jnp.ones(segment_ids.shape, jnp.float32), segment_ids)
    sums = document_sums(values, segment_ids)
    return sums / jnp.maximum(count, 1.0)[..., None]
