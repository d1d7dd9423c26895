"""Encoders of post-norm blocks, as BERT (https://arxiv.org/abs/1810.04805) has them: biases
everywhere, and a head over the vocabulary with a dense layer of its own.

    tokens --embed--> norm --> blocks --> hidden --dense--> act --> norm --> logits

    x --+--> attention --+--> norm --+--> mlp --+--> norm -->
        +----------------^           +----------^
"""

from typing import Annotated, ClassVar

from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt
from lmwright.core.compute import Compute
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.weight import before_products, dot
from lmwright.models.block import feed_forward, output, with_bias
from lmwright.models.decoder import Decoder, Head
from lmwright.models.layer_norms import norm_spec, normed
from lmwright.models.layers import layers_spec
from lmwright.models.own_keys import refuse_groups
from lmwright.nn.mlp import PlainMlp, activate


class PostNorm(Decoder):
    """An encoder of post-norm blocks; families say where positions are, and the attention."""

    both_ways: ClassVar[bool] = True
    normed_branches: ClassVar = ("o", "down")

    mlp_dim: PositiveInt
    norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    mlp: PlainMlp
    head: Head

    def __post_init__(self) -> None:
        refuse_groups(self)

    def spec(self) -> Tree:
        """Every weight, once."""
        d, std = self.embed_dim, self.embed_std
        return {
            **self.embedding_spec(),
            **layers_spec(self.spans, self.layer_spec),
            **self.norm_spec("embed_norm", "head_norm"),
            "dense": Param("embed -> embed", (d, d), std=std),
            "dense_bias": Param("norm", (d,), fill=0.0),
            "decoder_bias": Param("vocab", (self.vocab_size,), fill=0.0),
        }

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        d, n, h, f, std = (
            self.embed_dim, self.num_heads, self.head_dim, self.mlp_dim, self.embed_std
        )  # fmt: skip
        heads = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
        biases = {f"{name}_bias": Param(f"{axis} head_dim", (n, h), fill=0.0)
                  for name, axis in heads.items()}  # fmt: skip
        return {
            **{name: Param(f"embed -> {axis} head_dim", (d, n, h), std=std)
               for name, axis in heads.items()},
            **biases,
            "o": Param("heads head_dim -> embed", (n, h, d), std=std),
            "o_bias": Param("norm", (d,), fill=0.0),
            "up": Param("embed -> mlp", (d, f), std=std),
            "up_bias": Param("mlp", (f,), fill=0.0),
            "down": Param("mlp -> embed", (f, d), std=std),
            "down_bias": Param("norm", (d,), fill=0.0),
            **self.norm_spec("attention_norm", "mlp_norm"),
        }  # fmt: skip

    def norm_spec(self, *names: str) -> Tree:
        """Weights of norms with these names."""
        return norm_spec(self.embed_dim, *names)

    def normed(self, w: Tree, name: str, x: Array) -> Array:
        """x [..., D] after the norm of this name."""
        return normed(w, name, x, self.norm_eps)

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        return self.normed(w, "embed_norm", super().embedded(w, tokens, compute))

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        names = ("dense", "dense_bias", "head_norm", "head_norm_bias", "decoder_bias")
        return super().head_weights(w) | {name: w[name] for name in names}

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        h = with_bias(dot("btd,de->bte", hidden, w["dense"]), w, "dense")
        h = self.normed(w, "head_norm", activate(self.mlp, h))
        return with_bias(super().logits(w, before_products(h)), w, "decoder")

    def after_attention(self, w: Tree, x: Array, h: Array, chunk_tokens: int | None) -> Array:
        """x [B, T, D] after the output of attention h [B, T, N, H] and the mlp."""
        h = constrain(output(w, h), "batch stream embed")
        x = self.normed(w, "attention_norm", constrain(x + h, "batch stream embed"))
        h = constrain(feed_forward(self.mlp, w, x, chunk_tokens), "batch stream embed")
        return self.normed(w, "mlp_norm", x + h)
