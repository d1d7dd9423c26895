"""Solar Open (https://arxiv.org/abs/2601.07022): blocks of a llama, with DeepSeek-V3's experts in
every layer."""

from typing import Literal

from lmwright.config.run import Positive, section
from lmwright.models.moe import MoeDecoder


@section
class SolarOpen(MoeDecoder):
    """A decoder of the Solar Open models; its fields are the model."""

    kind: Literal["solar-open"] = "solar-open"
    rope_theta: Positive = 1_000_000.0
    bias: Literal["none", "qkv"] = "none"
    """Projections that add a bias."""
