"""LLaDA (https://arxiv.org/abs/2502.09992): the blocks of a llama that look both ways, and write
text by filling in masks."""

from typing import ClassVar, Literal

from lmwright.config.run import PositiveInt, section
from lmwright.models.decoder import Head
from lmwright.models.llama import PreNorm


@section
class Llada(PreNorm):
    """A masked diffusion language model of pre-norm blocks."""

    both_ways: ClassVar[bool] = True
    fills_masks: ClassVar[bool] = True

    kind: Literal["llada"] = "llada"
    mlp_dim: PositiveInt
    head: Head = "untied"
    bias: Literal["none", "qkv", "attention"] = "none"
    """Projections that add a bias."""
    predicts: Literal["own", "next"] = "own"
    """Token that an output predicts: its own, or the next one as in a causal model."""
