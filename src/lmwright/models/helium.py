"""Helium (https://huggingface.co/kyutai/helium-1-2b): a llama whose rotations turn neighboring dims
of a head."""

from typing import Annotated, Literal

from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.models.decoder import Head
from lmwright.models.glm4 import Neighbors
from lmwright.nn.mlp import GatedMlp


@section
class Helium(Neighbors):
    """A decoder of the Helium models; its fields are the model."""

    kind: Literal["helium"] = "helium"
    mlp_dim: PositiveInt
    rope_theta: Positive = 100_000.0
    norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    head: Head = "untied"
    bias: Literal["none", "qkv", "mlp"] = "none"
    """Projections that add a bias."""
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""
