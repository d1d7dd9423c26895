"""Similarity of two texts: an encoder learns vectors whose cosine is the number of the pair.

    batch [A, B, T] --encoder--> vectors of all texts --cosine of each pair--> [M]

`numbers` is the squared difference, as sentence-transformers' CosineSimilarityLoss; `order` orders
the pairs of the whole batch, as its CoSENTLoss (https://kexue.fm/archives/8847): of two pairs, the
one with the larger number is to have the larger cosine. A row holds pairs of texts; `loss_weight`
is the number of a pair at the first token of its first text. In shapes, M are the places for pairs.
"""

from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.rows import SCORED_PAIRS
from lmwright.config.run import Positive, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model
from lmwright.core.param import Tree
from lmwright.core.pipeline import interleaved
from lmwright.errors import UserError
from lmwright.models.embedder import Embedder, unit
from lmwright.models.hf.embedder import TokenPooling
from lmwright.objectives.documents import Judged
from lmwright.objectives.embed import NOT_COMPARED, Embed
from lmwright.objectives.over import OverObjective

TEMPERATURE = 0.05


class ScoredPairs(NamedTuple):
    """The pairs of a batch."""

    cosine: Array  # float32 [M]
    score: Array  # float32 [M]
    there: Array  # float32 [M]: 1 for a pair, else 0


@section
class Similarity(OverObjective):
    """A cosine for each pair of texts."""

    kind: Literal["similarity"] = "similarity"
    pooling: TokenPooling = "mean"
    """Tokens that a vector is made of: the mean of all, or the first one."""
    compares: Literal["numbers", "order"] = "numbers"
    """`numbers` is the squared difference of cosine and number; `order` compares all pairs of a
    batch by which number is larger (CoSENT)."""
    temperature: Positive = TEMPERATURE
    """Temperature of the cosines whose order is compared; 1 / 0.05 is the scale 20 of
    sentence-transformers."""

    labels: ClassVar[tuple[str, ...]] = ()
    learns_from: ClassVar[str] = SCORED_PAIRS
    tally: ClassVar[str] = "numbers.NumberRowTally"
    whole_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.compares == "numbers" and self.temperature != TEMPERATURE:
            raise UserError(
                'objective.temperature: has no effect with compares = "numbers"; set "order", or '
                "leave it out"
            )

    @property
    def _vectors(self) -> Embed:
        return Embed(pooling=self.pooling)

    def model_over(self, encoder: Model) -> Embedder:
        """The encoder without its head. Raises UserError for one that gives no vectors."""
        return self._vectors.model_over(encoder)

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """The loss of a pair summed over pairs, or that of the batch's order times its pairs; `key`
        is unused, nothing is sampled."""
        return self.judged(model, w, batch, compute).loss

    def judged(self, model: Model, w: Tree, batch: Batch, compute: Compute) -> Judged:
        """The loss, and the numbers and the cosines [M] of pairs."""
        embed = self._vectors
        texts, (added, more) = embed.texts(self.model_over(model), w, batch, compute)
        if batch.tokens.ndim == 3:
            batch = jax.tree.map(interleaved, batch)
        pairs = scored_pairs(texts.vectors, texts.there, batch)
        count = jnp.sum(pairs.there)
        squares = jnp.sum(jnp.square(pairs.cosine - pairs.score) * pairs.there)
        total = squares
        if self.compares == "order":
            total = order_loss(pairs, self.temperature) * count
        loss = Loss(total + added * count, count, {"mse": (squares, count), **more})
        return Judged(loss, pairs.score, pairs.cosine, pairs.there)


def scored_pairs(vectors: Array, there: Array, batch: Batch) -> ScoredPairs:
    """Pairs of the texts [B, S, D] of rows [B, T], each second one with the one before it."""
    ids = jnp.arange(1, vectors.shape[1] + 1)[:, None]
    first = (batch.positions == 0) * batch.loss_weight
    score = jnp.sum((batch.segment_ids[:, None] == ids) * first[:, None], axis=2)  # [B, S]
    most = vectors.shape[1] // 2 * 2
    a, b = unit(vectors[:, 0:most:2]), unit(vectors[:, 1:most:2])
    pair = there[:, 0:most:2] & there[:, 1:most:2]
    parts = (jnp.sum(a * b, axis=-1), score[:, 0:most:2], pair.astype(jnp.float32))
    return ScoredPairs(*(part.reshape(-1) for part in parts))


def order_loss(pairs: ScoredPairs, temperature: float) -> Array:
    """Logarithm of 1 and the sum, over pairs of which one has the larger number, of the exponential
    of how much larger the other's cosine is, over the temperature."""
    scaled, score, there = pairs.cosine / temperature, pairs.score, pairs.there > 0
    wrong = (score[:, None] < score[None]) & there[:, None] & there[None]
    apart = jnp.where(wrong, scaled[:, None] - scaled[None], NOT_COMPARED)
    return jax.nn.logsumexp(jnp.append(apart.reshape(-1), 0.0))
