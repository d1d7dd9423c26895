"""OLMo 2 in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.pairs import ACT, BIAS, HEAD
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import WEIGHTS, Table


class Olmo2Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "OLMo 2"
    model_types: ClassVar = {"Olmo2ForCausalLM": "olmo2"}
    weights = WEIGHTS | {
        "layers.attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    }
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
    pairs = (ACT, HEAD, BIAS, ROPE)
