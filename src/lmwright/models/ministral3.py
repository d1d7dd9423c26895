"""Ministral 3 (https://huggingface.co/mistralai/Ministral-3-8B-Base-2512), Devstral Small 2: blocks
of a llama, whose queries grow far into a text, as in Llama 4.

    growth at token t = 1 + query_growth * log(1 + floor(t / original_seq_len))
"""

from dataclasses import field
from functools import partial
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Tree
from lmwright.models.llama import PreNorm
from lmwright.nn.rope import YarnRope, apply_rope

RELEASED: dict[str, Any] = {
    "factor": 16.0, "original_seq_len": 16_384, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
QueryGrowth = Annotated[
    float,
    Field(
        ge=0, allow_inf_nan=False,
        description="Weight of the logarithm by which queries grow with each context of the "
        "training before.",
    ),
]  # fmt: skip


def growth(positions: Array, weight: float, rope: YarnRope) -> Array:
    """float32 [B, T, 1]: how much longer queries at positions [B, T] are."""
    times = positions // rope.original_seq_len
    return 1 + weight * jnp.log1p(times.astype(jnp.float32))[..., None]


@section
class Ministral3(PreNorm):
    """A decoder of the Ministral 3 family; its fields are the model."""

    kind: Literal["ministral3"] = "ministral3"
    mlp_dim: PositiveInt
    query_growth: QueryGrowth = 0.1
    rope_theta: Positive = 1_000_000.0
    rope_scaling: YarnRope = field(default_factory=partial(YarnRope, **RELEASED))
    """Rotations for contexts longer than those of the training before."""

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations of queries and of keys for positions [B, T] in rows of `length`; the former
        also make queries longer."""
        cos, sin = super().tables(positions, length)
        times = growth(positions, self.query_growth, self.rope_scaling)
        return (cos * times, sin * times), (cos, sin)

    def rotated(self, q: Array, k: Array, tables: Tree) -> tuple[Array, Array]:
        """Queries and keys after the rotation."""
        of_queries, of_keys = tables
        return apply_rope(q, of_queries), apply_rope(k, of_keys)
