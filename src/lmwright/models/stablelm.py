"""StableLM 3B and StableLM 2 (https://arxiv.org/abs/2402.17834): blocks of a llama with layer
norms, of which a part of each head is rotated. In the 12B attention and mlp read the same norm, and
each head of queries and keys has a norm of its own."""

from typing import Literal

from lmwright.config.run import PositiveInt, section
from lmwright.models.layer_normed import LayerNormed, Residual, RotaryFraction
from lmwright.nn.mlp import GatedMlp


@section
class StableLm(LayerNormed):
    """A decoder of the StableLM family; its fields are the model."""

    kind: Literal["stablelm"] = "stablelm"
    mlp_dim: PositiveInt
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""
    rotary_fraction: RotaryFraction = 0.25
    residual: Residual = "sequential"
    """What the mlp reads: the norm that attention reads, or one behind it."""
    qk_norm: Literal["none", "head"] = "none"  # type: ignore[misc]
    """Layer norm of each head of q and k, with weights of its own."""
    bias: Literal["none", "qkv"] = "none"
    """Projections that add a bias."""
