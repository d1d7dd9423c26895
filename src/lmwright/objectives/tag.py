"""Token tags: an encoder says which tag each word of a text has, such as parts of names.

A word's tag stands at its first token, as in transformers: `loss_weight` is its number plus 1
there, and 0 at every other token. Losses are sums over words, so they are the same however texts
are packed.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.rows import TAGGED_WORDS
from lmwright.config.run import section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model, Objective, Work
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.models import KINDS
from lmwright.models.heads import HEAD
from lmwright.models.tagger import Tagger
from lmwright.objectives.clm import penalties
from lmwright.objectives.documents import Judged, check_labels


@section
class Tag(Objective):
    """A tag for each word."""

    kind: Literal["tag"] = "tag"
    labels: Annotated[tuple[str, ...], Field(min_length=2)]
    """The tags, each once; their places are their numbers. Names of entities are in BIO: "O",
    "B-PER", "I-PER"."""

    both_ways: ClassVar[bool] = True
    new_weights: ClassVar[tuple[str, ...]] = (HEAD,)
    learns_from: ClassVar[str] = TAGGED_WORDS
    tally: ClassVar[str] = "tagged.TagRowTally"

    def __post_init__(self) -> None:
        check_labels(self.labels, "tag")

    def tagger(self, model: Model) -> Tagger:
        """The encoder with its layer of scores. Raises UserError for a model that has none."""
        if getattr(model, "document_head", None) is None:
            known = [name for name, family in KINDS.items() if hasattr(family, "document_head")]
            raise UserError(
                f"model.kind: {model.kind!r} gives no tags here; use "
                f"{' or '.join(map(repr, known))}"
            )
        return Tagger(model, self.labels)

    def spec(self, model: Model) -> Tree:
        """The encoder's weights without its head, and those of the layer of scores."""
        return self.tagger(model).spec()

    def works(self, model: Model, seq_len: int) -> Mapping[str, Work]:
        """The work of the tagger, which has no logits over the vocabulary."""
        return {"": self.tagger(model).work(seq_len)}

    def exported(self, model: Model, w: Tree) -> tuple[Model, Tree]:
        """The tagger, and its weights."""
        return self.tagger(model), w

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Cross-entropy summed over words; `key` is unused, nothing is sampled."""
        return self.judged(model, w, batch, compute).loss

    def judged(self, model: Model, w: Tree, batch: Batch, compute: Compute) -> Judged:
        """The loss, and the numbers of the tags [B, T] that words have and are given, each at its
        first token."""
        tagger = self.tagger(model)
        x, aux = tagger.hidden(w, batch, compute)
        logits = tagger.logits(w, x)
        there = (batch.loss_weight > 0).astype(jnp.float32)
        tag = jnp.maximum(batch.loss_weight.astype(jnp.int32) - 1, 0)
        chosen = jnp.take_along_axis(logits, tag[..., None], axis=-1)[..., 0]
        nll = jnp.sum((jax.nn.logsumexp(logits, axis=-1) - chosen) * there)
        weight = jnp.sum(there)
        guess = jnp.argmax(logits, axis=-1)
        right = jnp.sum((guess == tag) * there)
        metrics = {"nll": (nll, weight), "accuracy": (right, weight)}
        added, more = penalties(tagger, aux)
        return Judged(Loss(nll + added * weight, weight, metrics | more), tag, guess, there)
