"""GPT-2 (https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf):
a decoder of pre-norm blocks with layer norms, biases everywhere and learned positions.

    tokens --embed--+
    positions ------+--> blocks --> norm --> logits

    x --+--> norm --> attention --+--> norm --> mlp --+-->
        +-------------------------^ +-----------------^

As over there, q, k and v are one matrix, which LoRA's factors know:

    qkv      embed -> qkv heads head_dim     the heads of q, then those of k, then those of v
"""

from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products
from lmwright.models.block import attention_spec, feed_forward, mlp_spec, output
from lmwright.models.decoder import Head
from lmwright.models.fused import parts
from lmwright.models.layer_norms import norm_spec, normed
from lmwright.models.layers import Attend
from lmwright.models.learned_positions import LearnedPositions
from lmwright.models.own_keys import refuse_groups
from lmwright.nn.attention import Scoring
from lmwright.nn.mlp import PlainMlp


class Gpt2Blocks(LearnedPositions):
    """Blocks of GPT-2; `qkv_spec` and `projected` are its queries, keys and values."""

    mlp_dim: int
    mlp: PlainMlp

    def qkv_spec(self) -> Tree:
        """The matrix of queries, keys and values, and its bias."""
        raise NotImplementedError

    def projected(self, w: Tree, h: Array) -> tuple[Array, Array, Array]:
        """Queries [B, T, N, H], keys and values [B, T, K, H] of normed h [B, T, D]."""
        raise NotImplementedError

    def spec(self) -> Tree:
        """Every weight, once."""
        return super().spec() | norm_spec(self.embed_dim, "norm")

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        attention = attention_spec(self, "all")
        return {
            **norm_spec(self.embed_dim, "attention_norm", "mlp_norm"),
            **self.qkv_spec(),
            **{name: attention[name] for name in ("o", "o_bias")},
            **mlp_spec(self, self.mlp_dim, "mlp"),
        }

    def stream_norm(self, w: Tree, x: Array, name: str = "norm") -> Array:
        """x [B, T, D] after the norm of this name; the last one's is what the head sees."""
        return normed(w, name, x, self.norm_eps)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        h = before_products(self.stream_norm(w, x, "attention_norm"))
        q, k, v = self.projected(w, h)
        q = constrain(q, "batch seq heads head_dim")
        x = constrain(x + output(w, attend(q, k, v, Scoring(self.head_dim**-0.5))),
                      "batch stream embed")  # fmt: skip
        h = self.stream_norm(w, x, "mlp_norm")
        y = feed_forward(self.mlp, w, h, attend.mlp_chunk_tokens)
        return constrain(x + y, "batch stream embed"), {}


@section
class Gpt2(Gpt2Blocks):
    """A decoder of the GPT-2 family; its fields are the model."""

    own_keys: ClassVar[bool] = True

    kind: Literal["gpt2"] = "gpt2"
    mlp_dim: PositiveInt
    mlp: PlainMlp = "gelu_tanh"
    """Activation of the feed-forward."""
    head: Head = "tied"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_groups(self)

    def qkv_spec(self) -> Tree:
        """The matrix of queries, keys and values, and its bias."""
        d, n, h = self.embed_dim, self.num_heads, self.head_dim
        return {
            "qkv": Param("embed -> qkv heads head_dim", (d, 3, n, h)),
            "qkv_bias": Param("qkv heads head_dim", (3, n, h), fill=0.0),
        }

    def projected(self, w: Tree, h: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values [B, T, N, H] of normed h [B, T, D]."""
        q, k, v = (a[:, :, 0] for a in parts("btd,dpnh->btpnh", h, w, "qkv", [1, 2]))
        return q, k, v
