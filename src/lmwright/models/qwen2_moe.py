"""Qwen 2 with experts (https://arxiv.org/abs/2407.10671): biases of queries, keys and values, many
small experts, and shared ones of which each token takes a share; some layers plain."""

from typing import Literal

from lmwright.config.run import Positive, section
from lmwright.models.moe import DenseDim, DenseLayers, MoeDecoder


@section
class Qwen2Moe(MoeDecoder):
    """A decoder of the Qwen 2 models with experts; its fields are the model."""

    kind: Literal["qwen2-moe"] = "qwen2-moe"
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    rope_theta: Positive = 1_000_000.0
    norm_eps: Positive = 1e-6
    bias: Literal["none", "qkv"] = "qkv"
    """Projections that add a bias."""
