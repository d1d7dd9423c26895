"""GPT-NeoX (https://arxiv.org/abs/2204.06745), which Pythia is
(https://arxiv.org/abs/2304.01373): layer norms and biases everywhere, heads that are rotated in
part, and attention and mlp that read the same stream.

    x --+--> norm --> attention --+--+-->
        +--> norm --> mlp --------+  |
        +----------------------------^

With `residual = "sequential"` the mlp follows attention, as in a llama.

As over there, q, k and v are one matrix, which LoRA's factors know:

    qkv      embed -> heads qkv head_dim     of each head its q, its k and its v

Heads stay whole over `mesh.tensor`, each with its three parts.
"""

from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products, name_result
from lmwright.models.block import attention_spec, feed_forward, mlp_spec, output
from lmwright.models.decoder import Decoder
from lmwright.models.fused import parts
from lmwright.models.layer_norms import norm_spec, normed
from lmwright.models.layers import Attend
from lmwright.models.own_keys import refuse_groups
from lmwright.nn.attention import Scoring
from lmwright.nn.mlp import PlainMlp
from lmwright.nn.rope import apply_rope


@section
class GptNeox(Decoder):
    """A decoder of the GPT-NeoX family; its fields are the model."""

    own_keys: ClassVar[bool] = True

    kind: Literal["gpt-neox"] = "gpt-neox"
    mlp_dim: PositiveInt
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of each head that is rotated, from its first dim on."""
    residual: Literal["parallel", "sequential"] = "parallel"
    """What the mlp reads: the stream before attention, or with its result."""
    mlp: PlainMlp = "gelu_erf"
    """Activation of the feed-forward."""
    bias: Literal["mlp", "all"] = "all"
    """Projections that add a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_groups(self)

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    def spec(self) -> Tree:
        """Every weight, once."""
        return super().spec() | norm_spec(self.embed_dim, "norm")

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        d, n, h = self.embed_dim, self.num_heads, self.head_dim
        attention = attention_spec(self, self.bias)
        spec = {
            **norm_spec(d, "attention_norm", "mlp_norm"),
            "qkv": Param("embed -> heads qkv head_dim", (d, n, 3, h)),
            **{name: attention[name] for name in ("o", "o_bias") if name in attention},
            **mlp_spec(self, self.mlp_dim, "mlp"),
        }
        if self.bias == "all":
            spec["qkv_bias"] = Param("heads qkv head_dim", (n, 3, h), fill=0.0)
        return spec

    def stream_norm(self, w: Tree, x: Array, name: str = "norm") -> Array:
        """x [B, T, D] after the norm of this name; the last one's is what the head sees."""
        return normed(w, name, x, self.norm_eps)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: tuple[Array, Array], attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        h = before_products(self.stream_norm(w, x, "attention_norm"))
        q, k, v = (a[:, :, :, 0] for a in parts("btd,dnph->btnph", h, w, "qkv", [1, 2], axis=1))
        q = constrain(q, "batch seq heads head_dim")
        q, k = name_result(apply_rope(q, tables)), name_result(apply_rope(k, tables))
        h = output(w, attend(q, k, v, Scoring(self.head_dim**-0.5)))
        after = constrain(x + h, "batch stream embed")
        read = x if self.residual == "parallel" else after
        h = self.stream_norm(w, read, "mlp_norm")
        y = feed_forward(self.mlp, w, h, attend.mlp_chunk_tokens)
        return constrain(after + y, "batch stream embed"), {}
