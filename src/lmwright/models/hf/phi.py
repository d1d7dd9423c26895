"""Phi-1, Phi-1.5 and Phi-2 in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.pairs import EVEN_WIDTH, HEAD, PLAIN_ACT, Json, Words
from lmwright.models.hf.rope import PARTIAL_ROPE
from lmwright.models.hf.table import KEYS, STREAM_BIASES, WEIGHTS, Table, with_biases

LAYER = {
    "o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2", "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
}  # fmt: skip


class PhiHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Phi-2"
    model_types: ClassVar = {"PhiForCausalLM": "phi"}
    weights = WEIGHTS | STREAM_BIASES | {
        "head_bias": "lm_head.bias",
        **with_biases({
            "norm": "model.final_layernorm",
            **{f"layers.{ours}": f"model.layers.{{i}}.{name}" for ours, name in LAYER.items()},
        }),
    }  # fmt: skip
    keys: ClassVar = {n: key for n, key in KEYS.items() if n != "head_dim"} | {
        "norm_eps": "layer_norm_eps"
    }
    pairs = (
        *(PLAIN_ACT, HEAD, EVEN_WIDTH, PARTIAL_ROPE),
        Words("qk_norm", "qk_layernorm", {"head": True, "none": False}),
    )
    defaults: ClassVar[Json] = {
        "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5, "vocab_size": 51_200, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
    }  # fmt: skip
