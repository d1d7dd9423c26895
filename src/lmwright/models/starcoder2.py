"""StarCoder 2 (https://arxiv.org/abs/2402.19173): blocks of a llama with layer norms, biases and an
mlp without a gate; few heads of keys and values, and a window in all layers."""

from typing import Literal

from lmwright.config.run import PositiveInt, section
from lmwright.models.decoder import Head, LayerReach
from lmwright.models.layer_normed import LayerNormed
from lmwright.nn.mlp import PlainMlp


@section
class Starcoder2(LayerNormed):
    """A decoder of the StarCoder 2 family; its fields are the model."""

    kind: Literal["starcoder2"] = "starcoder2"
    mlp_dim: PositiveInt
    mlp: PlainMlp = "gelu_tanh"
    """Activation of the feed-forward."""
    window: PositiveInt | None = None
    """Tokens that a query looks at, itself included."""
    head: Head = "tied"
    bias: Literal["none", "all"] = "all"
    """Projections that add a bias."""

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, ("local",)
