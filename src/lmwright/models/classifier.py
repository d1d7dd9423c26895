"""Classifier: an encoder that puts documents into classes, by a head in place of the one over its
vocabulary.

    x [B, T, D] --pool--> [B, S, D] --dense, GELU, out--> logits [B, S, K]     "bos", "mean"
    x [B, T, D] --dense, GELU, out--> [B, T, K] --pool--> logits [B, S, K]     "late"

Each segment of a packed row is a document. The head is that of transformers'
EuroBertForSequenceClassification. In shapes, K are the classes and S the documents of a row, as
many as it has tokens; those that are not there have logits without meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Metrics, Work
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import dot
from lmwright.models.hf.classifier import ClassifierHf, Pooling

HEAD = "classifier"  # its weights in the tree
KINDS = ("eurobert",)  # of encoders whose head this is


@dataclass(frozen=True)
class Classifier:
    """An encoder without its head, and the head over documents."""

    encoder: Any
    labels: tuple[str, ...]
    pooling: Pooling

    both_ways: ClassVar[bool] = True

    def __getattr__(self, name: str) -> Any:
        # dimensions, layers and settings are those of the encoder
        if name.startswith("__") or name == "encoder":
            raise AttributeError(name)
        return getattr(self.encoder, name)

    @property
    def hf(self) -> ClassifierHf:
        """Its table of Hugging Face names."""
        return ClassifierHf(self)

    def spec(self) -> Tree:
        """Every weight, once."""
        spec, d = self.encoder.spec(), self.encoder.embed_dim
        # the name that only the head over the vocabulary has
        return {name: tree for name, tree in spec.items() if name != "head"} | {
            HEAD: {
                "dense": Param("embed -> norm", (d, d)),
                "dense_bias": Param("norm", (d,), fill=0.0),
                "out": Param("embed -> norm", (d, len(self.labels))),
                "out_bias": Param("norm", (len(self.labels),), fill=0.0),
            }
        }

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`; the embedding is only looked up."""
        work = self.encoder.work(seq_len)
        active = {path: share for path, share in work.active.items() if path != "head"}
        return replace(work, spec=self.spec(), active={**active, "embed": 0.0})

    def with_noise(self, w: Tree, noise: Array) -> Tree:
        """The weights, with noise [B, T, D] on the embeddings of a batch."""
        return self.encoder.with_noise(w, noise)

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """The residual stream after the last norm, [B, T, D], and sums of the layers beside it."""
        return self.encoder.hidden(w, batch, compute)

    def penalties(self, aux: Aux) -> tuple[Array | float, Metrics]:
        """Losses that the layers add, and their metrics."""
        return self.encoder.penalties(aux)

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        return {HEAD: w[HEAD]}

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [B, T, K] for hidden [B, T, D], be it pooled already or not."""
        head: Mapping[str, Any] = w[HEAD]
        h = dot("btd,de->bte", hidden, head["dense"]) + head["dense_bias"].astype(hidden.dtype)
        h = jax.nn.gelu(h, approximate=False)
        return dot("bte,ek->btk", h, head["out"], out_dtype=jnp.float32) + head["out_bias"]

    def classify(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """Logits float32 [B, T, K] of the documents of each row, the first T of them, and sums of
        the layers."""
        x, aux = self.hidden(w, batch, compute)
        x, ids = constrain(x, "batch seq embed"), batch.segment_ids
        if self.pooling == "mean":
            return self.logits(w, document_means(x, ids).astype(x.dtype)), aux
        logits = self.logits(w, x)
        if self.pooling == "late":
            return document_means(logits, ids), aux
        return document_sums(logits * first_tokens(batch)[..., None], ids), aux


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
