"""Embedder: an encoder that gives each document a vector, in place of its head.

    x [B, T, D] --mean over a document, or its first token--> vectors [B, S, D]

Each segment of a packed row is a document. In shapes, S are the places for documents of a row;
those that are not there have zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.errors import UserError
from lmwright.models.detector import Detector
from lmwright.models.hf import TABLES
from lmwright.models.hf.embedder import EMBEDDER, Length, TokenPooling
from lmwright.models.over import OverEncoder, encoder_of

EMBED = "embed"  # the table of the vocabulary, in the tree


@dataclass(frozen=True)
class Embedder(OverEncoder):
    """An encoder without its head, and how the tokens of a document become its vector."""

    hf: ClassVar = EMBEDDER
    called: ClassVar[str] = "an embedder"
    task: ClassVar[str] = "sentence-similarity"
    outputs: ClassVar[str] = "hidden states"

    pooling: TokenPooling = "mean"
    length: Length = "one"
    """Length of the vectors: `one` scales them to 1, `any` leaves them."""
    prompts: tuple[tuple[str, str], ...] = ()
    """Texts by name, of which one may be put before each text."""
    default_prompt: str | None = None
    """Name of the prompt that is put before a text unless another is asked for."""
    max_tokens: int | None = None
    """Tokens to which longer texts are cut; as many as the encoder takes if unset."""

    @property
    def seq_len(self) -> int:
        """Tokens of the longest text that is not cut."""
        return min(self.encoder.seq_len, self.max_tokens or self.encoder.seq_len)

    def note(self) -> dict[str, Any]:
        """Settings by which vectors are made, and the prompts, if there are any."""
        prompts = {"prompts": dict(self.prompts)} if self.prompts else {}
        return {"pooling": self.pooling, "length": self.length} | prompts

    def with_prompts(self, prompts: Mapping[str, str]) -> "Embedder":
        """The model of a run that put these before its texts, by name."""
        return replace(self, prompts=tuple(prompts.items()))

    def without_head(self, w: Tree) -> Tree:
        """The encoder's weights that this model has, too."""
        spec = self.encoder.spec()
        own = {EMBED} | spec.keys() - self.encoder.head_weights(spec).keys()
        return {name: tree for name, tree in w.items() if name in own}

    def spec(self) -> Tree:
        """Every weight, once."""
        return self.without_head(self.encoder.spec())

    def head_weights(self, w: Tree) -> Tree:
        """Nothing: it has no head."""
        return {}

    def logits(self, w: Tree, hidden: Array) -> Array:
        """The hidden states themselves, float32 [B, T, D], which are compared as logits are."""
        return hidden.astype(jnp.float32)

    def vectors(self, w: Tree, batch: Batch, compute: Compute, places: int) -> tuple[Array, Aux]:
        """float32 [B, S, D] of the documents of each row, the first `places` of them, not scaled,
        and sums of the layers."""
        x, aux = self.hidden(w, batch, compute)
        x, ids = constrain(x, "batch seq embed").astype(jnp.float32), batch.segment_ids
        counted = ids > 0
        if self.pooling == "first":
            counted &= batch.positions == 0
        taken = counted[:, None] & (ids[:, None] == jnp.arange(1, places + 1)[:, None])  # [B, S, T]
        share = taken / jnp.maximum(jnp.sum(taken, axis=2, keepdims=True), 1)
        return jnp.einsum("bst,btd->bsd", share, x, precision=lax.Precision.HIGHEST), aux


def embedder_of(
    model: Model, pooling: TokenPooling | None = None, length: Length | None = None
) -> Embedder:
    """An encoder as a model that gives vectors: as it says itself where it does, else means of
    hidden states as they are. Raises UserError for other models."""
    if isinstance(model, Embedder):
        return replace(model, pooling=pooling or model.pooling, length=length or model.length)
    if isinstance(model, Detector):  # pretrained by it, and without a head for anything else
        model = model.encoder
    if encoder_of(model) is not model:
        raise UserError(
            f"model.kind: this {model.kind!r} has a head that is not for vectors; give the encoder "
            "that it came from"
        )
    if model.kind not in (kinds := vector_kinds()):
        raise UserError(
            f"model.kind: {model.kind!r} cannot be trained to give vectors; use an encoder of kind "
            f"{' or '.join(map(repr, kinds))}"
        )
    return Embedder(model, pooling or "mean", length or "any")


def vector_kinds() -> list[str]:
    """Kinds of encoders that give vectors."""
    return [kind for kind, table in TABLES.items() if table.body]


def unit(vectors: Array) -> Array:
    """Vectors [..., D] scaled to length 1; zeros stay."""
    square = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors * lax.rsqrt(jnp.maximum(square, 1e-24))
