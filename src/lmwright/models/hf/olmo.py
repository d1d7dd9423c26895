"""The first OLMo in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.pairs import ACT, BIAS, HEAD, NO_IDS
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import KEYS, WEIGHTS, Table


class OlmoHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "the first OLMo"
    model_types: ClassVar = {"OlmoForCausalLM": "olmo"}
    weights: ClassVar = {
        ours: theirs for ours, theirs in WEIGHTS.items() if not ours.endswith("norm")
    }
    keys: ClassVar = {ours: theirs for ours, theirs in KEYS.items() if ours != "norm_eps"}
    optional: ClassVar = {"qkv_limit": "clip_qkv"}
    pairs = (ACT, HEAD, BIAS, ROPE, NO_IDS)
    defaults: ClassVar = {
        "max_position_embeddings": 2048, "vocab_size": 50_304, "hidden_size": 4096,
        "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
    }  # fmt: skip
