"""Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence): blocks with experts, of which
three in four attend in chunks and rotate neighboring dims of queries and keys, which have a norm
without weights behind it. The others look at the whole row and rotate nothing, and their queries
grow far into a text:

    growth at token t = 1 + query_growth * log(1 + floor((t + 1) / growth_tokens))
"""

from typing import Annotated, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Tree
from lmwright.core.weight import name_result
from lmwright.errors import UserError
from lmwright.models.block import output, project
from lmwright.models.by_reach import THREE_OF_FOUR, reach_in
from lmwright.models.chunks import Chunked
from lmwright.models.decoder import LayerReach
from lmwright.models.glm4 import Neighbors
from lmwright.models.layers import Attend
from lmwright.models.moe import AttentionBias, DenseDim, DenseLayers
from lmwright.models.moe_by_reach import MoeByReach
from lmwright.nn.attention import Scoring
from lmwright.nn.chunks import InChunks
from lmwright.nn.unit_norm import unit_norm

GROWTH_TOKENS = 8192


@section
class Llama4(Chunked, Neighbors, MoeByReach):
    """A decoder of the Llama 4 family; its fields are the model."""

    kind: Literal["llama4"] = "llama4"
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    chunk_tokens: PositiveInt = 8192
    """Tokens of a chunk, beyond which local layers do not look."""
    layer_pattern: tuple[LayerReach, ...] = THREE_OF_FOUR
    """Reach of each layer, of which local ones rotate; the pattern repeats over all layers."""
    rotated_norm: Literal["none", "head"] = "head"
    """Norm, without weights, of each head of queries and keys behind their rotation."""
    query_growth: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Weight of the logarithm by which queries of global layers grow; 0 for none."""
    growth_tokens: PositiveInt = GROWTH_TOKENS
    """Tokens between two steps of that growth."""
    rope_theta: Positive = 500_000.0
    bias: AttentionBias = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.query_growth and self.growth_tokens != GROWTH_TOKENS:
            raise UserError("model.growth_tokens: has no effect without model.query_growth")

    def window_of(self, kind: str) -> int | None:
        """Tokens of the chunks of such a layer; None for whole rows."""
        return self.chunk_tokens if reach_in(kind) == "local" else None

    def tables(self, positions: Array, length: int) -> Tree:
        """For positions [B, T] in rows of `length`: rotations of local layers, growth of queries in
        global ones."""
        times = ((positions + 1) // self.growth_tokens).astype(jnp.float32)
        growth = 1 + self.query_growth * jnp.log1p(times)
        return {"local": super().tables(positions, length), "global": growth}

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that attention adds to x [B, T, D]."""
        q, k, v = project(w, self.attention_input(w, x))
        local, scoring = reach_in(kind) == "local", Scoring(self.score_scale, self.window_of(kind))
        if local:
            q, k = self.rotated(q, k, tables["local"])
            if self.rotated_norm == "head":
                q, k = (unit_norm(a, self.norm_eps) for a in (q, k))
        else:
            q = (q * tables["global"][..., None, None]).astype(q.dtype)
        q, k = map(name_result, (q, k))
        return output(w, attend(q, k, v, InChunks(*scoring) if local else scoring))
