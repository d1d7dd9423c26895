"""StarCoder 1 and SantaCoder (https://arxiv.org/abs/2305.06161): blocks of GPT-2, whose heads share
one key and one value.

As over there, q, k and v are one matrix, which LoRA's factors know:

    qkv      embed -> heads head_dim     the heads of q, then the key, then the value
"""

from typing import Literal

from jax import Array

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.errors import UserError
from lmwright.models.decoder import Head
from lmwright.models.fused import parts
from lmwright.models.gpt2 import Gpt2Blocks
from lmwright.nn.mlp import PlainMlp


@section
class GptBigcode(Gpt2Blocks):
    """A decoder of the GPT-BigCode family; its fields are the model."""

    kind: Literal["gpt-bigcode"] = "gpt-bigcode"
    mlp_dim: PositiveInt
    mlp: PlainMlp = "gelu_tanh"
    """Activation of the feed-forward."""
    head: Head = "tied"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads != 1:
            raise UserError(
                f"model.num_kv_heads: {self.num_kv_heads} is not 1, and all heads share one here; "
                "set it to 1"
            )

    def qkv_spec(self) -> Tree:
        """The matrix of queries, keys and values, and its bias."""
        d, heads, h = self.embed_dim, self.num_heads + 2, self.head_dim
        return {
            "qkv": Param("embed -> heads head_dim", (d, heads, h)),
            "qkv_bias": Param("heads head_dim", (heads, h), fill=0.0),
        }

    def projected(self, w: Tree, h: Array) -> tuple[Array, Array, Array]:
        """Queries [B, T, N, H], keys and values [B, T, 1, H] of normed h [B, T, D]."""
        q, k, v = parts("btd,dnh->btnh", h, w, "qkv", [self.num_heads, self.num_heads + 1])
        return q, k, v
