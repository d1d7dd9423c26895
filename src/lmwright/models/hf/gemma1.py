"""The first Gemma in Hugging Face."""

from dataclasses import replace
from typing import ClassVar

from lmwright.models.hf.gemma import ACT, HEAD, NOT_SUPPORTED
from lmwright.models.hf.pairs import Fixed
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import Table


class Gemma1Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Gemma"
    model_types: ClassVar = {"GemmaForCausalLM": "gemma"}
    pairs = (
        # the first release says gelu, and means its tanh form
        replace(ACT, theirs="hidden_act", same={"gelu": ACT.usual}),
        HEAD,
        Fixed("attention_bias", False, NOT_SUPPORTED, same=(None,)),
        Fixed("use_bidirectional_attention", False, NOT_SUPPORTED, same=(None,), written=False),
        ROPE,
    )
    defaults: ClassVar = {
        "num_key_value_heads": 16, "head_dim": 256, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
    }  # fmt: skip
