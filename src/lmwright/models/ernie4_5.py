"""ERNIE 4.5 (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): a llama whose
rotations turn neighboring dims of a head, as GLM's do. Its larger models have experts: softmax
routing balanced by a bias, and shared ones for every token."""

from typing import Annotated, Literal

from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.models.decoder import Head
from lmwright.models.glm4 import Neighbors
from lmwright.models.moe import DenseDim, DenseLayers, MoeDecoder
from lmwright.nn.mlp import GatedMlp


@section
class Ernie45(Neighbors):
    """A decoder of the dense ERNIE 4.5 models; its fields are the model."""

    kind: Literal["ernie4-5"] = "ernie4-5"
    mlp_dim: PositiveInt
    rope_theta: Positive = 500_000.0
    norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    head: Head = "tied"
    bias: Literal["none", "all"] = "none"
    """Projections that add a bias."""
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""


@section
class Ernie45Moe(Neighbors, MoeDecoder):
    """A decoder of the ERNIE 4.5 models with experts; its fields are the model."""

    kind: Literal["ernie4-5-moe"] = "ernie4-5-moe"
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    rope_theta: Positive = 500_000.0
    norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    head: Head = "tied"
