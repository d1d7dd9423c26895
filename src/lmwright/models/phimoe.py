"""Phi-3.5-MoE (https://arxiv.org/abs/2404.14219): layer norms, and experts whose routing
weights are those of GRIN (https://arxiv.org/abs/2409.12136).

The best expert is weighed against those that come near it, then the second among the rest in the
same way. GRIN's training draws one of those that are near; here, as in transformers outside of
training, the best ones are taken, with the same gradients of their routing weights.
"""

from typing import Annotated, Literal

from pydantic import Field

from lmwright.config.run import section
from lmwright.models.biased_head import BiasedHead, HeadBias
from lmwright.models.layer_normed import LayerNormed
from lmwright.models.moe import AttentionBias, MoeDecoder, Window


@section
class Phimoe(BiasedHead, LayerNormed, MoeDecoder):
    """A decoder of the Phi-3.5-MoE family; its fields are the model."""

    kind: Literal["phimoe"] = "phimoe"
    window: Window = None
    bias: AttentionBias = "none"
    head_bias: Annotated[HeadBias, Field(description="Whether the head adds a bias.")] = "none"
