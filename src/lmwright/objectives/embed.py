"""Sentence embeddings: an encoder whose vectors of texts that belong together are near each other.

    batch [A, B, T] --encoder--> vectors of all texts --cosine / temperature--> scores [M, N]

InfoNCE (https://arxiv.org/abs/1807.03748): the score of an anchor's positive against those of all
other texts of the whole batch, on all devices and hosts and in all microbatches, which are encoded
one after the other, and once more in the backward pass (https://arxiv.org/abs/2101.06983). A row
holds groups: an anchor, its positive, and negatives; `loss_weight` is 1 at the first token of an
anchor. In shapes, S are the places for texts of a row, N those of a batch, M those for anchors.
"""

from functools import partial
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.config.rows import RELATED_TEXTS, TOKENS_PER_TEXT
from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model
from lmwright.core.param import Tree
from lmwright.core.pipeline import interleaved, of_microbatch
from lmwright.errors import UserError
from lmwright.models.embedder import Embedder, embedder_of, unit
from lmwright.models.hf.embedder import TokenPooling
from lmwright.objectives.clm import penalties
from lmwright.objectives.over import OverObjective

NOT_COMPARED = -1e30  # score of a text that an anchor is not compared with


class Texts(NamedTuple):
    """Texts of a batch, by row [B, S, ...]."""

    vectors: Array
    there: Array  # bool
    anchor: Array  # bool
    marks: Array
    """Hashes uint32 [B, S, 2], equal for equal texts."""


class Pairs(NamedTuple):
    """Anchors and their positives, M of each, and all other texts, N."""

    there: Array  # bool [M]
    anchors: Array  # float32 [M, D]
    positives: Array  # float32 [M, D]
    others: Array  # float32 [N, D]
    seen: Array
    """bool [M, N]: the other texts that an anchor is compared with, without its own positive."""
    apart: Array
    """bool [M, M]: the anchors that a positive is compared with, without its own."""


@section
class Embed(OverObjective):
    """Vectors of texts that belong together."""

    kind: Literal["embed"] = "embed"
    pooling: TokenPooling = "mean"
    """Tokens that a vector is made of: the mean of all, or the first one."""
    temperature: Positive = 0.05
    """Temperature of the cosines; 1 / 0.05 is the scale 20 of sentence-transformers."""
    direction: Literal["anchors", "both"] = "anchors"
    """`both` also finds the anchor of a positive, and averages the two losses."""
    matryoshka_dims: tuple[PositiveInt, ...] = ()
    """Lengths at which the beginning of a vector is trained to serve alone, as in [768, 256, 64];
    the whole vector if empty."""
    matryoshka_weights: tuple[Positive, ...] = ()
    """Weight of the loss of each; 1 if empty."""

    learns_from: ClassVar[str] = RELATED_TEXTS
    tally: ClassVar[str] = "related.RelatedRowTally"
    whole_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        dims, weights = self.matryoshka_dims, self.matryoshka_weights
        if len(set(dims)) < len(dims):
            raise UserError("objective.matryoshka_dims: a number occurs twice; list each once")
        if weights and len(weights) != len(dims):
            raise UserError(
                f"objective.matryoshka_weights: {len(weights)} weights for {len(dims)} "
                "matryoshka_dims; give as many"
            )

    def model_over(self, encoder: Model) -> Embedder:
        """The encoder without its head. Raises UserError for one that gives no vectors, or none of
        so many numbers."""
        if (most := max(self.matryoshka_dims, default=0)) > encoder.embed_dim:
            raise UserError(
                f"objective.matryoshka_dims: {most} is more than model.embed_dim = "
                f"{encoder.embed_dim}; leave it out"
            )
        return embedder_of(encoder, self.pooling, "one")

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Cross-entropy summed over anchors; `key` is unused, nothing is sampled."""
        embedder = self.model_over(model)
        texts, (added, more) = self.texts(embedder, w, batch, compute)
        pairs = pairs_of(texts)
        dims = self.matryoshka_dims or (embedder.embed_dim,)
        weights = self.matryoshka_weights or (1.0,) * len(dims)
        scored = jax.checkpoint(self.scored, static_argnums=1)  # else scores of all dims are kept
        sums = {dim: scored(pairs, dim) for dim in dims}
        count = jnp.sum(pairs.there.astype(jnp.float32))
        nll, right = sums[max(dims)]
        total = sum(share * sums[dim][0] for dim, share in zip(dims, weights, strict=True))
        metrics = {"nll": (nll, count), "accuracy": (right, count)}
        return Loss(total + added * count, count, metrics | more)

    def texts(
        self, embedder: Embedder, w: Tree, batch: Batch, compute: Compute
    ) -> tuple[Texts, tuple[Array | float, dict[str, tuple[Array, Array]]]]:
        """The texts of rows [B, T] or, one microbatch after the other, [A, B, T], and the penalties
        of the layers, with their metrics."""

        def encode(rows: Batch, w: Tree = w) -> tuple[Array, tuple[Array | float, dict]]:
            vectors, aux = embedder.vectors(w, rows, compute, places_of(rows))
            return vectors, penalties(embedder, aux)

        if batch.tokens.ndim == 2:
            vectors, added = encode(batch)
        else:
            one = jax.checkpoint(lambda rows, number: encode(rows, of_microbatch(w, number)))
            pieces = batch, jnp.arange(len(batch.tokens))
            vectors, (total, metrics) = lax.map(lambda piece: one(*piece), pieces)
            vectors, batch = interleaved(vectors), jax.tree.map(interleaved, batch)
            added = jnp.mean(total), jax.tree.map(jnp.sum, metrics)
        ids = jnp.arange(1, places_of(batch) + 1)[:, None]
        inside = batch.segment_ids[:, None] == ids  # [B, S, T]
        anchor = jnp.any(inside & (batch.loss_weight > 0)[:, None], axis=2)
        there = jnp.any(inside, axis=2)
        return Texts(vectors, there, anchor, marks_of(batch, inside)), added

    def scored(self, pairs: Pairs, dim: int) -> tuple[Array, Array]:
        """The loss summed over anchors, by the first `dim` numbers of the vectors, and the number
        of anchors that are nearest to their positive."""
        a, p, o = (unit(x[:, :dim]) / self.temperature**0.5 for x in pairs[1:4])
        product = partial(jnp.einsum, "md,nd->mn", precision=lax.Precision.HIGHEST)
        own = jnp.sum(a * p, axis=-1)
        scores = jnp.where(pairs.seen, product(a, o), NOT_COMPARED)
        log_z = _log_sum(own, scores)
        if self.direction == "both":
            log_z = (log_z + _log_sum(own, jnp.where(pairs.apart, product(p, a), NOT_COMPARED))) / 2
        right = own > jnp.max(scores, axis=1, initial=NOT_COMPARED)
        return jnp.sum((log_z - own) * pairs.there), jnp.sum(right & pairs.there, dtype=jnp.float32)


def _log_sum(own: Array, scores: Array) -> Array:
    return jnp.logaddexp(own, jax.nn.logsumexp(scores, axis=1))


def places_of(batch: Batch) -> int:
    """Number of places for texts in a row."""
    return max(2, batch.tokens.shape[-1] // TOKENS_PER_TEXT)


def marks_of(batch: Batch, inside: Array) -> Array:
    """uint32 [B, S, 2] of the texts that tokens [B, S, T] are `inside`: two sums of hashes of each
    token and its position, which differ for all but the same texts."""
    x = batch.tokens.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    x ^= batch.positions.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    sums = [_mixed(x + jnp.uint32(seed))[:, None] * inside for seed in (1, 0x7F4A7C15)]
    return jnp.stack([jnp.sum(s, axis=2, dtype=jnp.uint32) for s in sums], axis=-1)


def _mixed(x: Array) -> Array:
    """Bits well mixed (https://github.com/skeeto/hash-prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def pairs_of(texts: Texts) -> Pairs:
    """Anchors with their positives, and what they are compared with.

    A text that equals the anchor or its positive is no negative of it; nor is the positive of an
    equal anchor.
    """
    rows, places = texts.there.shape
    most = places // 2  # anchors of a row
    order = jnp.argsort(~texts.anchor, axis=1, stable=True)[:, :most]  # anchors first

    def taken(values: Array, after: int = 0) -> Array:
        at = jnp.minimum(order + after, places - 1)
        found = jnp.take_along_axis(values, at.reshape(rows, most, *(1,) * (values.ndim - 2)), 1)
        return found.reshape(rows * most, *values.shape[2:])

    flat = lambda x: x.reshape(rows * places, *x.shape[2:])  # noqa: E731
    there = taken(texts.anchor) & taken(texts.there, 1)
    a, p, every = taken(texts.marks), taken(texts.marks, 1), flat(texts.marks)
    # of what belongs to an anchor, the mark of that anchor
    follows = jnp.pad(texts.anchor, ((0, 0), (1, 0)))[:, :-1]
    before = flat(jnp.pad(texts.marks, ((0, 0), (1, 0), (0, 0)))[:, :-1])
    others = flat(texts.there & ~texts.anchor)[None]
    number = jnp.arange(rows)[:, None] * places + order + 1
    own = number.reshape(-1, 1) == jnp.arange(rows * places)
    same = _equal(p, every) | _equal(a, every) | (_equal(a, before) & flat(follows))
    alike = _equal(a, a) | _equal(p, a) | _equal(p, p)  # an anchor is like itself
    return Pairs(
        there, taken(texts.vectors), taken(texts.vectors, 1), flat(texts.vectors),
        others & ~own & ~same, there & ~alike,
    )  # fmt: skip


def _equal(a: Array, b: Array) -> Array:
    """bool [M, N]: True where a mark of [M, 2] equals one of [N, 2]."""
    return jnp.all(a[:, None] == b[None], axis=-1)
