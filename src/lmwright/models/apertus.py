"""Apertus (https://arxiv.org/abs/2509.14233): a llama with norms of q and k in each head, whose
plain mlp has xIELU, an activation with learned slopes.

    h --> up --> xIELU --> down -->
"""

import math
from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import OPERAND
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.weight import before_products, dot, name_result
from lmwright.models.chunked import chunked
from lmwright.models.decoder import Head
from lmwright.models.layers import Attend, LayerResult
from lmwright.models.llama import PreNorm
from lmwright.nn.xielu import xielu

FIXED = {"xielu_beta": 0.5, "xielu_eps": -1e-6}
SLOPES = {  # whose softplus, of the second beside beta, is 0.8
    "xielu_alpha_p": math.log(math.expm1(0.8)),
    "xielu_alpha_n": math.log(math.expm1(0.8 - FIXED["xielu_beta"])),
}
XIELU = (*SLOPES, *FIXED)
MLP_WEIGHTS = {  # and their axes in one layer
    "up": "embed mlp", "down": "mlp embed",
    **dict.fromkeys(SLOPES, "gates"), **dict.fromkeys(FIXED, ""),
}  # fmt: skip


@section
class Apertus(PreNorm):
    """A decoder of the Apertus models; its fields are the model."""

    mlp: ClassVar = "xielu"  # type: ignore[misc]
    qk_norm: ClassVar = "head"
    kind: Literal["apertus"] = "apertus"
    mlp_dim: PositiveInt
    rope_theta: Positive = 12_000_000.0
    head: Head = "untied"
    bias: Literal["none", "attention"] = "none"
    """Projections that add a bias."""

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of the mlp, and the numbers of xIELU: two slopes, and two that no training
        changes."""
        slopes = {name: Param("gates", (1,), fill=fill) for name, fill in SLOPES.items()}
        fixed = {name: Param("", (), fill=fill) for name, fill in FIXED.items()}
        return super().ffn_spec(kind) | slopes | fixed

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> LayerResult:
        """[B, T, D] of h [B, T, D]."""
        return chunked(_mlp, MLP_WEIGHTS, w, h, attend.mlp_chunk_tokens), {}


def _mlp(w: Tree, h: Array) -> Array:
    up = constrain(dot("btd,df->btf", before_products(h), w["up"]), "batch seq mlp")
    h = name_result(xielu(up, *(w[name] for name in XIELU)), OPERAND)
    return dot("btf,fd->btd", h, w["down"])
