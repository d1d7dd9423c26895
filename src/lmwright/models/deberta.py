"""DeBERTa-v3 (https://arxiv.org/abs/2111.09543): an encoder of post-norm blocks whose attention
scores content and relative position separately (`nn.disentangled`).

    distances --relative--> norm --> every block

Positions are distances alone, and every block projects the same rows of `relative` [2k, D] with its
own weights of queries and keys.
"""

from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Attention, Batch, Work
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import gathered
from lmwright.core.stack import Aux
from lmwright.core.weight import as_array, before_products, dot
from lmwright.errors import UserError
from lmwright.kernels import select
from lmwright.models.block import project, with_bias
from lmwright.models.decoder import Head
from lmwright.models.heads import DocumentHead
from lmwright.models.layers import Attend, run_layers
from lmwright.models.post_norm import PostNorm
from lmwright.nn.disentangled import Disentangled, rows_in_order
from lmwright.nn.mlp import PlainMlp

TERMS = 3  # of a score, whose sum is divided by the root of their number


@section
class Deberta(PostNorm):
    """An encoder of the DeBERTa-v3 family; its fields are the model."""

    document_head: ClassVar[DocumentHead] = DocumentHead(("cls",))
    rope_theta: ClassVar[None] = None  # type: ignore[misc, assignment]
    rope_scaling: ClassVar[None] = None  # type: ignore[misc]
    reasoning: ClassVar[None] = None  # type: ignore[misc]

    kind: Literal["deberta"] = "deberta"
    mlp_dim: PositiveInt
    position_buckets: Annotated[int, Field(ge=2)] = 256
    """Rows of distances on either side: near ones have one each, others share them by their
    logarithm."""
    max_distance: PositiveInt = 512
    """Distance in tokens from which all share the last row."""
    norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-7
    mlp: PlainMlp = "gelu_erf"
    """Activation of the feed-forward."""
    head: Head = "tied"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_distance <= self.position_buckets // 2 + 1:
            raise UserError(
                f"model.max_distance: {self.max_distance} leaves no far distances to "
                f"model.position_buckets = {self.position_buckets}, half of which are near; use "
                f"more than {self.position_buckets // 2 + 1}"
            )

    def spec(self) -> Tree:
        """Every weight, once."""
        rows = (2 * self.position_buckets, self.embed_dim)
        return {
            **super().spec(),
            **self.norm_spec("relative_norm"),
            "relative": Param("distances -> embed", rows, std=self.embed_std),
        }

    def distances(self, w: Tree, compute: Compute) -> Array:
        """The rows of distances as every layer sees them, [2k, D]."""
        rows = gathered(as_array(w["relative"], compute.dtype), "distances embed")
        return self.normed(w, "relative_norm", rows.astype(compute.dtype))

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """Residual stream after the last layer, [B, T, D] in the compute dtype, and what the
        layers return beside it."""
        x, kernel = self.embedded(w, batch.tokens, compute), select.disentangled_attention(compute)
        rows = self.distances(w, compute)
        return run_layers(self.layer, self.spans, w, x, rows, batch, compute, kernel)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp; `tables` are the rows of distances."""
        qkv = project(w, before_products(x))
        return self.attended(w, x, qkv, self.projected(w, tables), attend), {}

    def projected(self, w: Tree, rows: Array) -> tuple[Array, Array]:
        """Keys and queries [2k, N, H] of the rows of distances."""
        k, q = (with_bias(dot("td,dnh->tnh", rows, w[name]), w, name) for name in "kq")
        return k, q

    def attended(
        self, w: Tree, x: Array, qkv: tuple[Array, Array, Array], far: tuple[Array, Array],
        attend: Attend,
    ) -> Array:  # fmt: skip
        """x [B, T, D] after attention of these queries, keys and values, and the mlp."""
        scoring = Disentangled((TERMS * self.head_dim) ** -0.5, self.max_distance)
        h = attend.mix(*qkv, *far, setting=scoring)
        return self.after_attention(w, x, h, attend.mlp_chunk_tokens)

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`. Queries and keys meet each row of distances
        that occurs between them; the rows' own projections, once a batch, are not counted."""
        return _work(self, seq_len)


@lru_cache(256)
def _work(model: Deberta, seq_len: int) -> Work:
    buckets, layers, heads = 2 * model.position_buckets, model.num_layers, model.num_heads
    met = len(np.unique(rows_in_order(seq_len, buckets, model.max_distance)))
    active: dict[str, Any] = {"relative": 0.0}  # looked up
    if model.head == "untied":
        active["embed"] = 0.0
    return Work(
        spec=model.spec(),
        seq_len=seq_len,
        num_layers=layers,
        embed_dim=model.embed_dim,
        vocab_size=model.vocab_size,
        active=active,
        attention=Attention((None,) * layers, heads, heads, model.head_dim, both_ways=True),
        mixing_flops=2.0 * (TERMS - 1) * met * layers * heads * model.head_dim,
        uncut=("context", "stage"),
        normed=frozenset(model.normed_branches),
    )
