"""Mistral 4 (https://huggingface.co/mistralai/Mistral-Small-4-119B-2603): the layers of DeepSeek-V3
with softmax routing, whose queries grow far into a text as those of Ministral 3."""

from dataclasses import field
from functools import partial
from typing import Annotated, Any, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import section
from lmwright.core.param import Tree
from lmwright.models.latent import Latent
from lmwright.models.ministral3 import QueryGrowth, growth
from lmwright.nn.rope import YarnRope

RELEASED: dict[str, Any] = {
    "factor": 128.0, "original_seq_len": 8192, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


@section
class Mistral4(Latent):
    """A decoder of the Mistral 4 models; its fields are the model."""

    kind: Literal["mistral4"] = "mistral4"
    query_growth: QueryGrowth = 0.1
    rope_scaling: Annotated[
        YarnRope,
        Field(description="Rotations for contexts longer than those of the training before."),
    ] = field(default_factory=partial(YarnRope, **RELEASED))

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, and how much longer queries are."""
        times = growth(positions, self.query_growth, self.rope_scaling)
        return super().tables(positions, length), times

    def _projected(self, w: Tree, x: Array, tables: Tree) -> tuple[Array, Array, Array]:
        """Queries [B, T, N, H], latents [B, T, R] and rotated keys [B, T, 1, P] of x [B, T, D]."""
        rotations, times = tables
        q, latent, key = super()._projected(w, x, rotations)
        return q * times[..., None].astype(q.dtype), latent, key
