"""Mixtral (https://arxiv.org/abs/2401.04088): experts in every layer, the best two by softmax,
shares normalized over them; attention as in Mistral."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import STRICT, PositiveInt
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.models.decoder import Attend
from lmwright.models.moe_block import MoeDecoder, moe_layer, moe_spec


@dataclass(frozen=True, kw_only=True)
class Mixtral(MoeDecoder):
    """A decoder of the mixtral family; its fields are the model."""

    __pydantic_config__ = STRICT
    kind: Literal["mixtral"] = "mixtral"
    rope_theta: Annotated[float, Field(gt=0)] = 1_000_000.0
    window: PositiveInt | None = None
    """Tokens that every layer looks at, the query included."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5

    def spec(self) -> Tree:
        """Every weight, once."""
        return moe_spec(self)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: tuple[Array, Array], attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and experts."""
        return moe_layer(self, kind, w, x, tables, attend)
