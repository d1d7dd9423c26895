"""Seed-OSS (https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct): a llama with biases of
queries, keys and values, whose heads are wider together than the stream."""

from typing import Literal

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.models.decoder import Head
from lmwright.models.llama import PreNorm
from lmwright.nn.mlp import GatedMlp


@section
class SeedOss(PreNorm):
    """A decoder of the Seed-OSS models; its fields are the model."""

    kind: Literal["seed-oss"] = "seed-oss"
    mlp_dim: PositiveInt
    rope_theta: Positive = 10_000_000.0
    norm_eps: Positive = 1e-6
    head: Head = "untied"
    bias: Literal["none", "qkv", "attention"] = "qkv"
    """Projections that add a bias."""
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""
