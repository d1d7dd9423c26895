"""Nemotron-4 and Jais 2 in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.llama import BIAS
from lmwright.models.hf.pairs import HEAD, NO_IDS, Words
from lmwright.models.hf.rope import PARTIAL_ROPE, ROPE
from lmwright.models.hf.starcoder2 import ACTS, SAME
from lmwright.models.hf.table import KEYS, STREAM_BIASES, WEIGHTS, Table

ACT = Words("mlp", "hidden_act", ACTS, "relu2", same=SAME)


class NemotronHf(Table):
    """Both directions of Nemotron-4's Hugging Face form."""

    name = "Nemotron-4"
    model_types: ClassVar = {"NemotronForCausalLM": "nemotron"}
    weights = WEIGHTS | STREAM_BIASES
    keys = KEYS | {"norm_eps": "norm_eps"}
    pairs = (ACT, HEAD, BIAS, PARTIAL_ROPE, NO_IDS)
    defaults: ClassVar = {
        "norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 0.5,
    }  # fmt: skip


class Jais2Hf(Table):
    """Both directions of Jais 2's Hugging Face form."""

    name = "Jais 2"
    model_types: ClassVar = {"Jais2ForCausalLM": "jais2"}
    weights = WEIGHTS | STREAM_BIASES
    keys = KEYS | {"norm_eps": "layer_norm_eps"}
    pairs = (ACT, HEAD, BIAS, ROPE, NO_IDS)
    defaults: ClassVar = {
        "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "attention_bias": True,
        "mlp_bias": True,
    }  # fmt: skip
