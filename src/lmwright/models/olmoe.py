"""OLMoE (https://arxiv.org/abs/2409.02060): many small experts in every layer, shares as the
softmax leaves them; norms of q and k over all heads together."""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import STRICT
from lmwright.core.param import Param, Tree
from lmwright.core.stack import Aux
from lmwright.models.decoder import Attend
from lmwright.models.moe_block import MoeDecoder, moe_layer, moe_spec
from lmwright.nn.norm import rms_norm


@dataclass(frozen=True, kw_only=True)
class Olmoe(MoeDecoder):
    """A decoder of the olmoe family; its fields are the model."""

    __pydantic_config__ = STRICT
    kind: Literal["olmoe"] = "olmoe"
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    bias: Literal["none", "attention"] = "none"
    """Whether the projections of attention add a bias."""
    qkv_limit: Annotated[float, Field(gt=0)] | None = None
    """Largest magnitude of queries, keys and values; none if unset."""

    def spec(self) -> Tree:
        """Every weight, once."""
        n, k, h = self.num_heads, self.num_kv_heads, self.head_dim
        norms = {
            "q_norm": Param("heads head_dim", (n, h), fill=1.0),
            "k_norm": Param("kv_heads head_dim", (k, h), fill=1.0),
        }
        return moe_spec(self, norms)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: tuple[Array, Array], attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and experts."""

        def normed(*qkv: Array) -> tuple[Array, ...]:
            q, k, v = qkv
            q = _norm_of_all(q, w["q_norm"], self.norm_eps)
            qkv = (q, _norm_of_all(k, w["k_norm"], self.norm_eps), v)
            limit = self.qkv_limit
            return qkv if limit is None else tuple(jnp.clip(a, -limit, limit) for a in qkv)

        return moe_layer(self, kind, w, x, tables, attend, normed)


def _norm_of_all(x: Array, scale: Array, eps: float) -> Array:
    """RMS norm of x [B, T, N, H] over all heads, scale [N, H]."""
    flat = x.reshape(*x.shape[:2], -1)
    return rms_norm(flat, scale.reshape(-1), eps).reshape(x.shape)
