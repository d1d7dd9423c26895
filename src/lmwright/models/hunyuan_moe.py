"""Hunyuan with experts (https://huggingface.co/tencent/Hunyuan-A13B-Instruct): the blocks of the
dense models, with experts beside an mlp that every token takes."""

from typing import Literal

from lmwright.config.run import section
from lmwright.models.hunyuan import NormedBehind
from lmwright.models.moe import AttentionBias, MoeDecoder


@section
class HunyuanMoe(NormedBehind, MoeDecoder):
    """A decoder of Hunyuan's models with experts; its fields are the model."""

    kind: Literal["hunyuan-moe"] = "hunyuan-moe"
    bias: AttentionBias = "none"
