"""BERT (https://arxiv.org/abs/1810.04805), RoBERTa (https://arxiv.org/abs/1907.11692) and XLM-R
(https://arxiv.org/abs/1911.02116): encoders of post-norm blocks with learned positions.

    tokens --embed--+
    positions ------+--> norm --> blocks --> hidden
    types ----------+

The type of a token is 1 behind the separator that ends the first of two texts, else 0.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Work
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products, lookup
from lmwright.kernels import select
from lmwright.models.block import project
from lmwright.models.decoder import Decoder, Head
from lmwright.models.heads import DocumentHead
from lmwright.models.layers import Attend, Kernel, run_layers
from lmwright.models.post_norm import PostNorm
from lmwright.nn.attention import Scoring
from lmwright.nn.mlp import PlainMlp

TABLES = ("positions", "types")  # of rows that are looked up and added


@section
class Bert(PostNorm):
    """An encoder of the BERT family; its fields are the model."""

    document_head: ClassVar[DocumentHead] = DocumentHead(("cls",), activation="tanh")
    rope_theta: ClassVar[None] = None  # type: ignore[misc, assignment]
    rope_scaling: ClassVar[None] = None  # type: ignore[misc]
    reasoning: ClassVar[None] = None  # type: ignore[misc]

    kind: Literal["bert"] = "bert"
    mlp_dim: PositiveInt
    first_position: Annotated[int, Field(ge=0)] = 0
    """Row of the table of positions that the first token of a document has."""
    token_types: PositiveInt = 2
    """Rows of the table of types; with one row all tokens have the same."""
    separator_id: Annotated[int, Field(ge=0)] | None = None
    """Token behind which a document's second text begins; without one all tokens have type 0."""
    norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-12
    mlp: PlainMlp = "gelu_erf"
    """Activation of the feed-forward."""
    head: Head = "tied"

    @property
    def tells_texts_apart(self) -> bool:
        """True if the second of two texts has a type of its own."""
        return self.separator_id is not None and self.token_types > 1

    def spec(self) -> Tree:
        """Every weight, once."""
        rows, d = (self.first_position + self.seq_len, self.token_types), self.embed_dim
        tables = zip(TABLES, rows, strict=True)
        return super().spec() | {
            name: Param("distances -> embed", (count, d), std=self.embed_std)
            for name, count in tables
        }

    def hidden_by(
        self, kernel: Kernel, w: Tree, batch: Batch, compute: Compute
    ) -> tuple[Array, Aux]:
        """`hidden` by any attention that takes what `select.self_attention` does."""
        x = Decoder.embedded(self, w, batch.tokens, compute)
        rows = self.first_position + batch.positions, self._types(batch)
        for name, at in zip(TABLES, rows, strict=True):
            x = x + lookup(w[name], at, compute.dtype)
        x = self.normed(w, "embed_norm", constrain(x, "batch stream embed"))
        cut, join = select.pieces_of_rows(self, x, (), compute, kernel)
        x, aux = run_layers(self.layer, self.spans, w, cut(x), (), batch, compute, kernel)
        return join(x), aux

    def _types(self, batch: Batch) -> Array:
        """int32 [B, T]: the type of each token."""
        if not self.tells_texts_apart:
            return jnp.zeros_like(batch.tokens)
        ends = batch.tokens == self.separator_id
        before = jnp.cumsum(ends, axis=1, dtype=jnp.int32) - ends  # in the row
        start = jnp.arange(before.shape[1]) - batch.positions  # of each token's document
        before -= jnp.take_along_axis(before, jnp.maximum(start, 0), axis=1)
        return jnp.minimum(before, 1)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        h = attend(*project(w, before_products(x)), Scoring(self.head_dim**-0.5))
        return self.after_attention(w, x, h, attend.mlp_chunk_tokens), {}

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`."""
        return _work(self, seq_len)


@lru_cache(256)
def _work(model: Bert, seq_len: int) -> Work:
    of = Decoder.work(model, seq_len)
    return replace(of, active={**of.active, **dict.fromkeys(TABLES, 0.0)})


@section
class Roberta(Bert):
    """An encoder of the RoBERTa family, which differs in sizes and names alone."""

    kind: Literal["roberta"] = "roberta"  # type: ignore[assignment]
    first_position: Annotated[int, Field(ge=1)] = 2
    """Row of the table of positions that the first token of a document has."""
    token_types: PositiveInt = 1
    """Rows of the table of types; with one row all tokens have the same."""
    norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5

    @property
    def pad_id(self) -> int:
        """The token of padding in transformers, which begins positions behind its id."""
        return self.first_position - 1


@section
class XlmRoberta(Roberta):
    """A RoBERTa of many languages, with transformers' names for it."""

    kind: Literal["xlm-roberta"] = "xlm-roberta"  # type: ignore[assignment]
