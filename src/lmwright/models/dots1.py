"""dots.llm1 (https://arxiv.org/abs/2506.05767): the layers of DeepSeek-V3
(https://arxiv.org/abs/2412.19437) but for its attention. Sigmoid routing from the best groups,
balanced by a bias; shared experts for every token; the first layers plain."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import STRICT, NonNegativeInt, PositiveInt
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.models.decoder import Attend
from lmwright.models.moe_block import MoeDecoder, head_norms, moe_layer, moe_spec, norm_heads


@dataclass(frozen=True, kw_only=True)
class Dots1(MoeDecoder):
    """A decoder of the dots1 family; its fields are the model."""

    __pydantic_config__ = STRICT
    kind: Literal["dots1"] = "dots1"
    mlp_dim: PositiveInt
    """Width of the plain mlp of `dense_layers`."""
    dense_layers: tuple[NonNegativeInt, ...] = ()
    """Numbers of the layers that have a plain mlp."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    bias: Literal["none", "attention"] = "none"
    """Whether the projections of attention add a bias."""

    def spec(self) -> Tree:
        """Every weight, once."""
        return moe_spec(self, head_norms(self))

    def layer(
        self, kind: str, w: Tree, x: Array, tables: tuple[Array, Array], attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and experts."""
        normed = partial(norm_heads, w, self.norm_eps)
        return moe_layer(self, kind, w, x, tables, attend, normed)
