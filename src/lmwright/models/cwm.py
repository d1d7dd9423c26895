"""Code World Model (https://arxiv.org/abs/2510.02387): a llama of which three in four layers look
through a window."""

from typing import Literal

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.models.decoder import Head, LayerReach
from lmwright.models.llama import PreNorm
from lmwright.nn.mlp import GatedMlp


@section
class Cwm(PreNorm):
    """A decoder of the Code World Model; its fields are the model."""

    kind: Literal["cwm"] = "cwm"
    mlp_dim: PositiveInt
    window: PositiveInt = 8192
    """Tokens that local layers look at, the query included."""
    layer_pattern: tuple[LayerReach, ...] = ("global", "local", "local", "local")
    """Reach of each layer; the pattern repeats over all layers."""
    rope_theta: Positive = 1_000_000.0
    head: Head = "untied"
    bias: Literal["none", "mlp"] = "none"
    """Projections that add a bias."""
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, self.layer_pattern
